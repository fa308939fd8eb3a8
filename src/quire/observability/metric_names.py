"""Under which names metrics appear: Quire's own, or vLLM's for dashboards that were made for it.

A metric bears vLLM's prefix only if it means the same; one that means something else, or that vLLM does not have, keeps
`quire:` whatever the option says, so that no dashboard shows a number for what it is not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from prometheus_client.core import Metric

from quire.observability.metric_prefixes import OWN_PREFIX

# Without prefix and without the ending of a counter.
SAME_AS_VLLM = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
    }
)
# What the same thing was called before; dashboards in use still ask for it. Only with vLLM's prefix.
OLDER_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}


def renamed(metric: Metric, prefix: str) -> Iterator[Metric]:
    """The metric under the name that `prefix` asks for, and once more under an older name where there is one."""
    bare = metric.name.removeprefix(OWN_PREFIX)
    if prefix == OWN_PREFIX or bare not in SAME_AS_VLLM or not metric.name.startswith(OWN_PREFIX):
        yield metric
        return
    for name in (bare, OLDER_NAMES.get(bare)):
        if name is not None:
            yield _named(metric, prefix + name)


def _named(metric: Metric, name: str) -> Metric:
    """Its samples begin with its name: a counter's end in _total, a histogram's in _bucket and so on."""
    other = copy.copy(metric)
    other.name = name
    other.samples = [sample._replace(name=name + sample.name[len(metric.name) :]) for sample in metric.samples]
    return other

"""What a server counts, for Prometheus. One registry a server: there is no global one, so many live in one process.

Names are vLLM's with `quire:` in place of `vllm:`, where the meaning is the same (metric_names.py), so a dashboard that
was made for vLLM needs one replacement, or a server with metrics_prefix=vllm:. Two sources: what the front end sees
itself (tokens, latencies, ends of requests), and the engine's `statistics()`, which are fetched when somebody asks for
the metrics. No label holds a prompt, a key, a user or a request's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.observability.instruments import Counter, Gauge, Histogram
from quire.observability.metric_names import renamed
from quire.observability.metric_prefixes import OWN_PREFIX
from quire.observability.request_observer import RequestObserver
from quire.observability.step_times import CORE_PHASES, OVERHEAD_PHASES, SENT, WORKER_PHASES
from quire.observability.tracing import current_trace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_WHOLE_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_CHOICES = (1, 2, 5, 10, 20)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


@dataclass(frozen=True)
class EngineMetric:
    """How one of the engine's statistics appears. Several may share a name and differ in their labels."""

    name: str
    help_text: str
    labels: Mapping[str, str] = field(default_factory=dict)


SLOT_STATES = ("token_states", "shared", "reserved", "cached", "kept", "pinned", "free")
HOST_STATES = ("swapped", "free")
_SLOTS = "Slots of the KV cache; a slot holds a token. They add up to all of it."
_HOST_SLOTS = "Slots of swap space."

_NAMED: dict[str, tuple[str, str]] = {
    "num_requests_running": ("quire:num_requests_running", "Requests that are being computed."),
    "num_requests_waiting": ("quire:num_requests_waiting", "Requests that wait to be admitted or resumed."),
    "num_requests_preempted": ("quire:num_requests_preempted", "Those among the waiting that had run before."),
    "num_preemptions_total": ("quire:num_preemptions_total", "Preemptions of requests."),
    "num_preemptions_by_recompute_total": (
        "quire:num_preemptions_by_recompute_total",
        "Preempted requests whose tokens are computed again.",
    ),
    "num_preemptions_by_swap_total": (
        "quire:num_preemptions_by_swap_total",
        "Preempted requests whose blocks were moved to swap space.",
    ),
    "recomputed_tokens_total": ("quire:recomputed_tokens_total", "Tokens computed again after a preemption."),
    "swapped_out_blocks_total": ("quire:swapped_out_blocks_total", "Blocks moved to swap space."),
    "swapped_in_blocks_total": ("quire:swapped_in_blocks_total", "Blocks brought back from swap space."),
    "preemption_lost_seconds_total": (
        "quire:preemption_lost_seconds_total",
        "Time spent on computing again and on swapping.",
    ),
    "preemption_tax": (
        "quire:preemption_tax_ratio",
        "That time as a part of all that the engine has worked, since it began: 0 without preemptions.",
    ),
    "overhead_per_step": (
        "quire:engine_overhead_seconds_per_step",
        "What a step costs beside the model: receive, schedule, update and deliver, a mean since the engine began.",
    ),
    "overhead_per_request": (
        "quire:engine_overhead_seconds_per_request",
        "The same for each request that came: its first and its last step, and all between them.",
    ),
    "num_requests_total": ("quire:num_requests_total", "Requests that came to the engine."),
    "num_steps_total": ("quire:num_steps_total", "Steps of the engine; one may bring several tokens of a row."),
    "kv_cache_usage": (
        "quire:kv_cache_usage_perc",
        "Share of the KV cache's blocks held by requests, sessions and pinned prefixes, 0 to 1.",
    ),
    "num_blocks": ("quire:kv_cache_blocks", "Blocks of the KV cache."),
    "num_blocks_held": ("quire:kv_cache_blocks_held", "Blocks held by requests, sessions and pinned prefixes."),
    "num_blocks_cached": ("quire:kv_cache_blocks_cached", "Blocks that nobody holds and that a prefix may revive."),
    "num_blocks_evicted_total": ("quire:kv_cache_blocks_evicted_total", "Cached blocks that were given to others."),
    "kv_cache_bytes": ("quire:kv_cache_bytes", "Bytes of the KV cache, in memory or not."),
    "kv_cache_resident_bytes": (
        "quire:kv_cache_resident_bytes",
        "Those that are in memory: on a CPU they come with their first use, and idle ones are given back.",
    ),
    "num_blocks_given_back_total": (
        "quire:kv_cache_blocks_given_back_total",
        "Blocks of the KV cache whose idle memory was given back to the system.",
    ),
    "resident_bytes": ("quire:engine_resident_bytes", "What the engine's workers have in memory."),
    "most_resident_bytes": (
        "quire:engine_most_resident_bytes",
        "What they were expected to have at most, when the engine started.",
    ),
    "num_blocks_copied_total": ("quire:kv_cache_blocks_copied_total", "Blocks copied on write."),
    "num_prefix_queried_tokens_total": (
        "quire:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "num_prefix_hit_tokens_total": ("quire:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    "num_draft_tokens_total": ("quire:spec_decode_num_draft_tokens_total", "Drafts that were verified."),
    "num_accepted_draft_tokens_total": (
        "quire:spec_decode_num_accepted_tokens_total",
        "Drafts that were right, each a step less.",
    ),
    "num_speculation_pauses_total": (
        "quire:spec_decode_num_pauses_total",
        "Times that a sequence went on without drafts, because they did not pay.",
    ),
    "num_dropped_tokens_total": (
        "quire:num_dropped_tokens_total",
        "Tokens that were computed past the end of a sequence, and never seen.",
    ),
    "num_dropped_outputs_total": (
        "quire:num_dropped_outputs_total",
        "Results of steps that nobody waited for: they came twice, late, or of an unknown step.",
    ),
    "num_failed_requests_total": (
        "quire:failed_requests_total",
        "Requests that failed alone, while the others went on.",
    ),
    "num_nan_rows_total": ("quire:nan_logits_total", "Rows whose logits were not finite; each failed its request."),
    "num_late_rows_total": (
        "quire:late_rows_total",
        "Rows whose next token was not there yet, because their form takes long to follow.",
    ),
    "num_divided_steps_total": (
        "quire:divided_steps_total",
        "Steps that failed as a whole and were run in parts, to find whose fault it was.",
    ),
    "num_out_of_memory_total": ("quire:out_of_memory_steps_total", "Those among them that were short of memory."),
    "num_images_encoded_total": ("quire:images_encoded_total", "Images that the encoder has run for."),
    "num_failed_stores_total": (
        "quire:kv_connector_failed_stores_total",
        "Prompts whose KV the connector could not take.",
    ),
    "fetched_tokens_total": ("quire:kv_connector_fetched_tokens_total", "Tokens whose KV came through the connector."),
    "fetched_blocks_total": ("quire:kv_connector_fetched_blocks_total", "Blocks that came through the connector."),
    "stored_blocks_total": ("quire:kv_connector_stored_blocks_total", "Blocks that went through the connector."),
    "num_broken_protections_total": (
        "quire:num_broken_protections_total",
        "Requests that gave way again before they had got on by a block.",
    ),
    "num_pinned_prefixes": ("quire:num_pinned_prefixes", "Prefixes that are never evicted."),
    "num_state_checkpoints": ("quire:num_state_checkpoints", "Checkpoints of recurrent states in the prefix cache."),
    "num_state_checkpoint_blocks": ("quire:state_checkpoint_blocks", "Blocks that they take."),
    "num_state_checkpoints_made_total": ("quire:state_checkpoints_made_total", "Checkpoints of recurrent states made."),
    "num_state_checkpoint_hit_tokens_total": (
        "quire:state_checkpoint_hit_tokens_total",
        "Prompt tokens that were not computed because a checkpoint was found behind them.",
    ),
    "num_kept_sequences": ("quire:num_kept_sequences", "Sequences kept for sessions, and pinned prefixes."),
    "num_blocks_saved_by_sharing": (
        "quire:kv_cache_blocks_saved_by_sharing",
        "Blocks that would be needed besides if sequences shared none.",
    ),
    "image_bytes_open": ("quire:image_bytes_open", "Pixels of requests that the front end has not finished."),
    "requests_open": ("quire:num_requests_open", "Requests that the front end has not finished."),
    "late_outputs_dropped": ("quire:late_outputs_dropped", "Outputs for requests that had ended already."),
    "num_hook_calls_total": ("quire:hook_calls_total", "Times that a hook was asked."),
    "num_hook_failures_total": ("quire:hook_failures_total", "Those that raised, took too long or said nonsense."),
    "num_hook_timeouts_total": ("quire:hook_timeouts_total", "Those among the failures that took too long."),
    "num_hook_stops_total": ("quire:hook_stops_total", "Answers that a hook has ended."),
    "num_hook_refusals_total": ("quire:hook_refusals_total", "Requests and calls of tools that a hook has refused."),
    "num_hook_calls_lost": ("quire:hook_calls_lost", "Calls of hooks that hang, each in a thread of its own."),
    "num_wasted_tokens_total": (
        "quire:wasted_tokens_total",
        "Tokens that nobody was left to read: the client had gone, or a stop string had ended the answer.",
    ),
    "num_replicas": ("quire:replicas", "Copies of the engine behind this server (data_parallel_size)."),
    "num_replicas_serving": ("quire:replicas_serving", "Those of them that take requests."),
    "num_replicas_lost_total": ("quire:replicas_lost_total", "Copies that have died while others went on."),
    "num_requests_retried_total": (
        "quire:requests_retried_total",
        "Requests that were begun again on another copy, because theirs died before anything had come.",
    ),
    "num_compiled_grammars": ("quire:compiled_grammars", "Compiled grammars of structured output that are kept."),
    "compiled_grammar_bytes": ("quire:compiled_grammar_bytes", "What they take in memory, estimated."),
    "num_grammar_compilations_total": ("quire:grammar_compilations_total", "Grammars that were compiled."),
    "grammar_compile_seconds_total": ("quire:grammar_compile_seconds_total", "Time spent on compiling them."),
    "num_lost_names": (
        "quire:lost_block_names",
        "Blocks that were cached once, and of which is remembered why they no longer are (first_miss).",
    ),
    "num_weight_updates": (
        "quire:weight_updates",
        "Updates that the model's weights have had since the checkpoint's: 0 in an engine that has begun anew.",
    ),
    "num_adapters_loaded": ("quire:adapters_loaded", "Adapters (LoRA) in memory."),
    "adapter_bytes": ("quire:adapter_bytes", "What slots and adapters in memory take, of one worker."),
    "num_adapters_in_slots": ("quire:adapters_in_slots", "Those of them that are in slots, ready for a step."),
    "num_adapter_slot_fills_total": (
        "quire:adapter_slot_fills_total",
        "Times that an adapter was brought into a slot; many of them say that max_loras is too small.",
    ),
    "num_adapter_evictions_total": (
        "quire:adapter_evictions_total",
        "Times that an idle adapter left memory for another; many of them say that max_cpu_loras is too small.",
    ),
    "trace_spans_exported_total": ("quire:trace_spans_exported_total", "Spans of traces that a collector took."),
    "trace_spans_dropped_total": (
        "quire:trace_spans_dropped_total",
        "Spans that were thrown away: the collector did not take them, or too slowly.",
    ),
    "storage_bytes": ("quire:storage_bytes", "What all stored rows take, about; it is counted anew once a minute."),
    "storage_waiting": ("quire:num_storage_calls_waiting", "Calls that wait for the database."),
    "storage_failures_total": (
        "quire:storage_failures_total",
        "Calls that the database failed; each is a 503, or a 507 on a full disk.",
    ),
}
# of blocks that go on living elsewhere (docs/kv-tiers.md)
_TIERS = {
    "kv_tiers_hits_total": (
        "quire:kv_tiers_hits_total",
        "Blocks that were asked for, and brought near.",
    ),
    "kv_tiers_misses_total": (
        "quire:kv_tiers_misses_total",
        "Blocks that were asked for, and that no store has or could bring.",
    ),
    "kv_tiers_late_total": ("quire:kv_tiers_late_total", "Requests that waited for blocks in vain, and computed them."),
    "kv_tiers_not_written_total": (
        "quire:kv_tiers_not_written_total",
        "Blocks that a store was not given: it is too slow to be worth it, away, or behind.",
    ),
    "kv_tiers_waiting_bytes": ("quire:kv_tiers_waiting_bytes", "What waits to be written to stores."),
    "kv_host_tier_bytes": ("quire:kv_host_tier_bytes", "Blocks in host memory, in bytes."),
    "kv_host_tier_blocks": ("quire:kv_host_tier_blocks", "Blocks in host memory."),
    "kv_host_tier_evicted_total": ("quire:kv_host_tier_evicted_total", "Blocks that left host memory for others."),
}
_OF_A_STORE = {
    "quire:kv_store_hits_total": "Blocks read from a store and found whole.",
    "quire:kv_store_read_bytes_total": "Bytes read from a store.",
    "quire:kv_store_written_bytes_total": "Bytes written to a store.",
    "quire:kv_store_failures_total": "Calls that a store failed, or was too late for.",
    "quire:kv_store_corrupt_total": "Blocks that a store gave back otherwise than written; they are computed.",
    "quire:kv_store_breaker_openings_total": "Times that a store was left alone for a while, because it failed.",
    "quire:kv_store_resting": "1 while a store is left alone.",
}
_PHASES_OF_CORE = (
    "Time of the engine's process by phase of a step. receive: messages; control: management calls; schedule; execute: "
    "the step goes to the workers, which compute it then where steps are decided one after the other; wait: for its "
    "results; update; deliver: messages."
)
_PHASES_OF_WORKER = (
    "Time of the first worker by phase of a step. prepare: changes and inputs; forward: the model, on a CPU with the "
    "choice of tokens where rows ask for nothing else; sample, which waits for a device; draft; finish."
)
_SENT = (
    "Bytes sent in steps. decisions: columns of what is decided; ranks: all of it, encoded, to other workers; device: "
    "inputs of a step; clients: messages to the processes in front of the engine."
)
_KINDS_OF_STORES = ("files", "redis_server", "s3", "mooncake", "nixl")
_EXPERT_TOKENS = re.compile(r"expert_([a-z0-9]+)_([a-z0-9]+)_tokens_total")
_OF_REPLICA = re.compile(r"replica_(\d+)_(sequences|waiting_tokens)")
_OF_ANY_EXPERT = "expert_number_number_tokens_total"
# Key of the engine's statistics -> metric. A metric whose name ends in _total is a counter, any other a gauge. Keys
# that are not here appear as quire:engine_KEY, so a new statistic is seen before anybody has named it.
ENGINE_STATISTICS: dict[str, EngineMetric] = {
    **{key: EngineMetric(name, text) for key, (name, text) in (_NAMED | _TIERS).items()},
    **{
        f"kv_store_{kind}_{name.removeprefix('quire:kv_store_')}": EngineMetric(name, text, {"store": kind})
        for name, text in _OF_A_STORE.items()
        for kind in _KINDS_OF_STORES
    },
    **{f"kv_slots_{state}": EngineMetric("quire:kv_cache_slots", _SLOTS, {"state": state}) for state in SLOT_STATES},
    **{f"host_slots_{state}": EngineMetric("quire:host_slots", _HOST_SLOTS, {"state": state}) for state in HOST_STATES},
    **{
        f"step_seconds_{phase}_total": EngineMetric("quire:step_seconds_total", _PHASES_OF_CORE, {"phase": phase})
        for phase in CORE_PHASES
    },
    **{
        f"worker_step_seconds_{phase}_total": EngineMetric(
            "quire:worker_step_seconds_total", _PHASES_OF_WORKER, {"phase": phase}
        )
        for phase in WORKER_PHASES
    },
    **{f"step_bytes_{what}_total": EngineMetric("quire:step_bytes_total", _SENT, {"what": what}) for what in SENT},
    # each of several copies has these
    "replica_number_sequences": EngineMetric(
        "quire:replica_sequences", "Sequences that a copy of the engine has in flight.", {"replica": "number"}
    ),
    "replica_number_waiting_tokens": EngineMetric(
        "quire:replica_waiting_tokens",
        "Prompt tokens that a copy of the engine is expected to compute before those that come.",
        {"replica": "number"},
    ),
    # a mixture of experts has such a key for each
    _OF_ANY_EXPERT: EngineMetric(
        "quire:expert_tokens_total",
        "Tokens that an expert computed, in models with a file of their own; the layer is `all`, and the sum over "
        "layers, where there are more than 1,024 experts in all. On a CPU the last layer computes few of a prompt's.",
        {"expert": "number", "layer": "number"},
    ),
}


def _metric_of(key: str) -> EngineMetric:
    if found := _EXPERT_TOKENS.fullmatch(key):
        return replace(ENGINE_STATISTICS[_OF_ANY_EXPERT], labels={"expert": found[2], "layer": found[1]})
    if found := _OF_REPLICA.fullmatch(key):
        return replace(ENGINE_STATISTICS[f"replica_number_{found[2]}"], labels={"replica": found[1]})
    return ENGINE_STATISTICS.get(key) or EngineMetric(f"quire:engine_{key}", f"Of the engine: {key}.")


def _ratios(statistics: Mapping[str, float]) -> dict[str, float]:
    """Of sums over all copies of an engine."""
    busy = sum(statistics.get(f"step_seconds_{phase}_total", 0.0) for phase in CORE_PHASES)
    own = sum(statistics.get(f"step_seconds_{phase}_total", 0.0) for phase in OVERHEAD_PHASES)
    parts = {
        "kv_cache_usage": (statistics.get("num_blocks_held", 0.0), statistics.get("num_blocks")),
        "preemption_tax": (statistics.get("preemption_lost_seconds_total", 0.0), busy),
        "overhead_per_step": (own, statistics.get("num_steps_total") if busy else 0),
        "overhead_per_request": (own, statistics.get("num_requests_total") if busy else 0),
    }
    return {name: part / whole for name, (part, whole) in parts.items() if whole}


def engine_metrics(statistics: Mapping[str, float], model_name: str) -> Iterator[Metric]:
    """The engine's statistics under their public names."""
    values = {**_ratios(statistics), **statistics}
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for key, value in sorted(values.items()):
        metric = _metric_of(key)
        if metric.name not in families:
            kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            families[metric.name] = kind(metric.name, metric.help_text, labels=["model_name", *metric.labels])
        families[metric.name].add_metric([model_name, *metric.labels.values()], value)
    yield from families.values()


_ENDS = ("stop", "length", "abort", "error")
_ABORTS = (
    "client_gone", "slow_client", "cancelled", "administrator", "queue_time", "request_time", "mistake", "shutdown",
    "engine_restarted",
)  # fmt: skip
_DEATHS = ("death", "stall")


class ServerMetrics(Collector):
    """All instruments of one server, and their registry."""

    def __init__(self, prefix: str = OWN_PREFIX) -> None:
        """`prefix`: of the names that vLLM has for the same thing (metric_names.py)."""
        self._prefix = prefix
        self._model_name = ""
        self._statistics: Mapping[str, float] = {}
        self._snapshots: Sequence[Mapping[str, list[Any]]] = ()
        self.prompt_tokens = Counter("quire:prompt_tokens_total", "Prompt tokens received.")
        self.prompt_tokens_cached = Counter(
            "quire:prompt_tokens_cached_total", "Prompt tokens that were computed already when their request began."
        )
        self.generation_tokens = Counter("quire:generation_tokens_total", "Tokens generated.")
        self.request_success = Counter(
            "quire:request_success_total",
            f"Requests by their end: {', '.join(_ENDS)}.",
            ["finished_reason"],
            known=_ENDS,
        )
        self.http_responses = Counter(
            "quire:http_responses_total", "Responses, by route and status.", ["route", "status"]
        )
        self.rejected = Counter(
            "quire:rejected_total",
            "Requests refused for want of room, by why: queued_requests, queued_tokens, tenant_requests, "
            "tenant_queued, tenant_tokens, images; queue_time: accepted, and waited too long.",
            ["why"],
        )
        self.queued_requests = Gauge("quire:queued_requests", "Sequences that were accepted and have not begun.")
        self.queued_tokens = Gauge("quire:queued_tokens", "Prompt tokens of those.")
        self.queue_oldest_seconds = Gauge("quire:queue_oldest_seconds", "How long the oldest of them has waited.")
        self.time_to_first_token = Histogram(
            "quire:time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN
        )
        self.inter_token_latency = Histogram(
            "quire:inter_token_latency_seconds", "Between two deliveries of tokens, per token.", _BETWEEN_TOKENS
        )
        self.e2e_request_latency = Histogram(
            "quire:e2e_request_latency_seconds", "From a request's arrival to its end.", _WHOLE_REQUEST
        )
        self.request_queue_time = Histogram(
            "quire:request_queue_time_seconds", "From a request's arrival to its first step.", _WHOLE_REQUEST
        )
        self.request_prefill_time = Histogram(
            "quire:request_prefill_time_seconds", "From a request's first step to its first token.", _WHOLE_REQUEST
        )
        self.request_interference_time = Histogram(
            "quire:request_interference_time_seconds",
            "Of that time the part that the engine has worked for others: by the tokens of the steps meanwhile.",
            _WHOLE_REQUEST,
        )
        self.request_decode_time = Histogram(
            "quire:request_decode_time_seconds", "From a request's first token to its last.", _WHOLE_REQUEST
        )
        self.request_inference_time = Histogram(
            "quire:request_inference_time_seconds", "From a request's first step to its end.", _WHOLE_REQUEST
        )
        self.request_time_per_output_token = Histogram(
            "quire:request_time_per_output_token_seconds",
            "Mean of a request: time after its first token, by tokens after the first of its longest sequence.",
            _BETWEEN_TOKENS,
        )
        self.request_prompt_tokens = Histogram("quire:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = Histogram(
            "quire:request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )
        self.request_max_num_generation_tokens = Histogram(
            "quire:request_max_num_generation_tokens", "Generated tokens of a request's longest sequence.", _TOKENS
        )
        self.request_params_n = Histogram("quire:request_params_n", "Sequences that a request asks for.", _CHOICES)
        self.request_params_max_tokens = Histogram(
            "quire:request_params_max_tokens", "Tokens that a request allows, where it says so.", _TOKENS
        )
        self.requests_aborted = Counter(
            "quire:requests_aborted_total",
            f"Requests ended before their end: {', '.join(_ABORTS)}.",
            ["kind"],
            known=_ABORTS,
        )
        self.engine_deaths = Counter(
            "quire:engine_deaths_total", f"Engines that died: {', '.join(_DEATHS)}.", ["kind"], known=_DEATHS
        )
        self.engine_stalls = Counter("quire:engine_stalls_total", "Engines that had work and made no progress.")
        self.engine_restarts = Counter("quire:engine_restarts_total", "Starts of an engine in the place of a dead one.")
        self.api_processes = Gauge("quire:api_processes", "Processes that answer HTTP in front of the engine.")
        self.api_processes.read = lambda: 1.0
        self.api_process_deaths = Counter(
            "quire:api_process_deaths_total", "Processes beside the first one that ended without being asked to."
        )
        self.event_loop_lag = Histogram(
            "quire:event_loop_lag_seconds", "How much later than asked the front end's event loop came to a task.", _LAG
        )
        self.event_loop_tasks = Gauge("quire:event_loop_tasks", "Tasks that the front end's event loop has.")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    @property
    def instruments(self) -> tuple[Counter | Gauge | Histogram, ...]:
        """In the order in which they were made."""
        return tuple(value for value in vars(self).values() if isinstance(value, Counter | Gauge | Histogram))

    def set_model_name(self, name: str) -> None:
        """Goes into the label `model_name` of every metric."""
        self._model_name = name

    def observe_request(
        self, num_prompt_tokens: int, now: float, *, n: int = 1, max_tokens: int | None = None
    ) -> RequestObserver:
        self.prompt_tokens.add(num_prompt_tokens)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_params_n.observe(n)
        if max_tokens is not None:
            self.request_params_max_tokens.observe(max_tokens)
        return RequestObserver(self, current_trace.get(), num_prompt_tokens, now, n=n)

    def observe_pooling(self, num_prompt_tokens: int, now: float) -> RequestObserver:
        """A request that becomes a vector: it brings no tokens, and says nothing about the lengths of outputs."""
        self.prompt_tokens.add(num_prompt_tokens)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        return RequestObserver(self, current_trace.get(), num_prompt_tokens, now, is_pooled=True)

    def snapshot(self) -> dict[str, list[Any]]:
        """All instruments, for another process of the same server."""
        return {instrument.name: instrument.snapshot() for instrument in self.instruments}

    def exposition(self, statistics: Mapping[str, float], snapshots: Sequence[Mapping[str, list[Any]]] = ()) -> bytes:
        """The text for Prometheus. `statistics` are the engine's, fresh; empty if it does not answer. `snapshots`: of
        the other processes, which are added."""
        self._statistics = statistics
        self._snapshots = snapshots
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for metric in self._own_metrics():
            yield from renamed(metric, self._prefix)

    def _own_metrics(self) -> Iterator[Metric]:
        yield from engine_metrics(self._statistics, self._model_name)
        for instrument in self.instruments:
            others = [one[instrument.name] for one in self._snapshots if instrument.name in one]
            yield from (instrument.plus(others) if others else instrument).collect(self._model_name)

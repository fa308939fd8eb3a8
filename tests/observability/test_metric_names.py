"""Metrics under vLLM's names, and the dashboard that reads them under Quire's."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.observability.instruments import Counter
from quire.observability.metric_names import OLDER_NAMES, SAME_AS_VLLM
from quire.observability.metric_prefixes import VLLM_PREFIX
from quire.observability.metrics import ENGINE_STATISTICS, ServerMetrics

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "quire.json"
# What the dashboards that vLLM's own documentation and the usual collections offer ask for.
ASKED_FOR_BY_DASHBOARDS = """
vllm:num_requests_running vllm:num_requests_waiting vllm:num_preemptions_total
vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count
vllm:time_per_output_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:request_time_per_output_token_seconds_bucket vllm:e2e_request_latency_seconds_bucket
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_inference_time_seconds_sum vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_max_num_generation_tokens_sum vllm:request_params_n_sum vllm:request_params_max_tokens_bucket
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
""".split()


def exposed(prefix: str = "quire:") -> dict[str, set[str]]:
    """Names of samples, each with its labels, of a server that has seen one of everything."""
    metrics = ServerMetrics(prefix)
    observer = metrics.observe_request(3, now=1.0, n=2, max_tokens=9)
    observer.started(1, now=1.5)
    observer.interfered(0.5)
    observer.tokens(1, now=2.0)
    observer.tokens(1, now=3.0)
    observer.finished("stop", now=4.0)
    for counter in metrics.instruments:
        if isinstance(counter, Counter) and counter.label_names:
            counter.add(1, *("x" for _ in counter.label_names))
    text = metrics.exposition(dict.fromkeys(ENGINE_STATISTICS, 1.0)).decode()
    families = list(text_string_to_metric_families(text))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("name", ASKED_FOR_BY_DASHBOARDS)
def test_a_dashboard_for_vllm_finds(name):
    assert name in exposed(VLLM_PREFIX)


def test_what_means_something_else_keeps_its_own_prefix():
    own, shared = exposed(), exposed(VLLM_PREFIX)
    assert all(name.startswith(("quire:", "process_")) for name in own)
    bare = {re.sub(r"^(vllm|quire):", "", name) for name in shared}
    older = {name for name in bare if name.startswith(tuple(OLDER_NAMES.values()))}
    assert bare - older == {name.removeprefix("quire:") for name in own}
    assert "quire:kv_cache_slots" in shared
    assert "quire:wasted_tokens_total" in shared
    # no number appears under both prefixes
    assert not {name.removeprefix("vllm:") for name in shared if name.startswith("vllm:")} & {
        name.removeprefix("quire:") for name in shared if name.startswith("quire:")
    }


def test_every_shared_name_is_there():
    names = exposed(VLLM_PREFIX)
    for bare in SAME_AS_VLLM:
        assert any(name.startswith(f"vllm:{bare}") for name in names), bare


def test_an_older_name_has_the_same_numbers():
    metrics = ServerMetrics(VLLM_PREFIX)
    text = metrics.exposition({"num_blocks": 8.0, "num_blocks_held": 2.0}).decode()
    assert 'vllm:kv_cache_usage_perc{model_name=""} 0.25' in text
    assert 'vllm:gpu_cache_usage_perc{model_name=""} 0.25' in text


# ------------------------------------------------------------------------------------------------- the dashboard


def expressions() -> list[tuple[str, str]]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_a_panel_asks_for_metrics_that_exist(title, expression):
    names, seen = exposed(), 0
    for name, labels in re.findall(r"((?:quire:|process_)\w+)\{([^}]*)\}", expression):
        assert name in names, f"{title}: {name}"
        # Prometheus itself adds `instance`
        asked = set(re.findall(r"(\w+)=~?\"", labels)) - {"instance"}
        assert asked <= names[name], f"{title}: {name} has the labels {names[name]}"
        seen += 1
    assert seen == len(re.findall(r"quire:|process_\w", expression)), f"{title}: a name that was not looked at"
    for grouped in re.findall(r"by \((\w+)\)", expression):
        assert grouped == "le" or any(grouped in labels for labels in names.values()), f"{title}: by {grouped}"


def test_panels_do_not_overlap():
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))

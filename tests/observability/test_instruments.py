"""Counters and histograms, as Prometheus reads them."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.observability.instruments import Counter, Histogram
from quire.observability.metrics import ENGINE_STATISTICS, ServerMetrics


class Collected:
    def __init__(self, *instruments):
        self.instruments = instruments

    def collect(self):
        for instrument in self.instruments:
            yield from instrument.collect("m")


def samples(collector) -> dict:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_a_histogram_counts_up_to_its_bounds():
    histogram = Histogram("h", "help", [1, 2.5])
    for value in (0.5, 1, 1.5, 2.5, 99):
        histogram.observe(value)
    found = samples(Collected(histogram))
    buckets = {dict(key[1:])["le"]: value for key, value in found.items() if key[0] == "h_bucket"}
    assert buckets == {"1.0": 2, "2.5": 4, "+Inf": 5}
    assert found["h_sum", ("model_name", "m")] == 104.5
    assert found["h_count", ("model_name", "m")] == histogram.count == 5


def test_a_counter_counts_by_label():
    plain, labelled = Counter("a_total", "help"), Counter("b_total", "help", ["kind"])
    plain.add(2.0)
    labelled.add(1, "x")
    labelled.add(3, "x")
    found = samples(Collected(plain, labelled))
    assert found["a_total", ("model_name", "m")] == 2
    assert found["b_total", ("kind", "x"), ("model_name", "m")] == 4


def test_a_request_is_counted_once():
    metrics = ServerMetrics()
    observer = metrics.observe_request(7, now=10.0)
    observer.tokens(0, now=11.0)
    observer.tokens(1, now=12.0)
    observer.tokens(2, now=13.0)
    observer.finished("stop", now=14.0)
    observer.finished("abort", now=15.0)
    assert metrics.prompt_tokens.value() == 7
    assert metrics.generation_tokens.value() == 3
    assert (metrics.request_success.value("stop"), metrics.request_success.value("abort")) == (1, 0)
    text = metrics.exposition({}).decode()
    assert 'quire:time_to_first_token_seconds_sum{model_name=""} 2.0' in text
    assert 'quire:inter_token_latency_seconds_sum{model_name=""} 0.5' in text
    assert 'quire:e2e_request_latency_seconds_sum{model_name=""} 4.0' in text


@pytest.mark.parametrize("key", ENGINE_STATISTICS)
def test_a_statistic_has_a_name_and_the_right_kind(key):
    metrics = ServerMetrics()
    name, labels = ENGINE_STATISTICS[key].name, ENGINE_STATISTICS[key].labels
    kind = "counter" if name.endswith("_total") else "gauge"
    text = metrics.exposition({key: 5.0}).decode()
    assert f"# TYPE {name} {kind}" in text
    shown = ",".join(f'{label}="{value}"' for label, value in sorted({"model_name": "", **labels}.items()))
    assert f"{name}{{{shown}}} 5.0" in text
    assert key.endswith("_total") == name.endswith("_total")


def test_slots_are_one_metric_by_state():
    text = ServerMetrics().exposition({"kv_slots_free": 3.0, "kv_slots_pinned": 4.0, "host_slots_free": 5.0}).decode()
    assert text.count("# TYPE quire:kv_cache_slots gauge") == 1
    assert 'quire:kv_cache_slots{model_name="",state="free"} 3.0' in text
    assert 'quire:kv_cache_slots{model_name="",state="pinned"} 4.0' in text
    assert 'quire:host_slots{model_name="",state="free"} 5.0' in text


def test_a_statistic_that_nobody_has_named_is_shown():
    text = ServerMetrics().exposition({"new_thing_total": 2.0}).decode()
    assert 'quire:engine_new_thing_total{model_name=""} 2.0' in text

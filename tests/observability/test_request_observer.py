"""The times of a request, and what a trace hears of them."""

import pytest

from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import current_trace


class Heard:
    def __init__(self):
        self.stages, self.counts = [], []

    def stage(self, name, start, end):
        self.stages.append((name, start, end))

    def count(self, num_prompt_tokens, num_generated_tokens, finish_reason):
        self.counts.append((num_prompt_tokens, num_generated_tokens, finish_reason))


@pytest.fixture
def heard():
    trace = Heard()
    token = current_trace.set(trace)
    yield trace
    current_trace.reset(token)


def sums(metrics: ServerMetrics) -> dict[str, float]:
    text = metrics.exposition({}).decode()
    lines = (line.split(" ") for line in text.splitlines() if '_sum{model_name=""}' in line)
    return {name.removeprefix("quire:").split("_sum")[0]: float(value) for name, value in lines}


def test_the_stages_of_a_request_add_up(heard):
    metrics = ServerMetrics()
    observer = metrics.observe_request(7, now=10.0, n=2, max_tokens=50)
    observer.started(4, now=11.0)
    observer.tokens(1, 13.0, 0)
    observer.tokens(1, 13.0, 1)
    observer.tokens(4, 17.0, 0)
    observer.finished("stop", now=18.0)
    observer.finished("abort", now=30.0)
    found = sums(metrics)
    expected = {
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 7.0,
        "time_to_first_token_seconds": 3.0,
        "e2e_request_latency_seconds": 8.0,
        # 4 seconds for the four tokens behind the first of the longest sequence
        "request_time_per_output_token_seconds": 1.0,
        "request_generation_tokens": 6.0,
        "request_max_num_generation_tokens": 5.0,
        "request_params_n": 2.0,
        "request_params_max_tokens": 50.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert metrics.prompt_tokens_cached.value() == 4
    assert heard.stages == [("queue", 10.0, 11.0), ("first token", 11.0, 13.0), ("generation", 13.0, 18.0)]
    assert heard.counts == [(7, 6, "stop")]


def test_one_that_never_started_has_waited_only(heard):
    metrics = ServerMetrics()
    metrics.observe_request(7, now=10.0).finished("abort", now=12.0)
    assert heard.stages == [("queue", 10.0, 12.0)]
    found = sums(metrics)
    assert found["request_inference_time_seconds"] == found["request_decode_time_seconds"] == 0
    assert metrics.request_queue_time.count == 0


def test_interference_is_a_part_of_prefill():
    metrics = ServerMetrics()
    observer = metrics.observe_request(7, now=10.0)
    observer.started(0, now=11.0)
    observer.interfered(0.25)
    observer.tokens(1, 15.0)
    observer.tokens(1, 16.0)
    observer.finished("stop", now=16.0)
    assert sums(metrics)["request_interference_time_seconds"] == 1.0
    unknown = metrics.observe_request(7, now=10.0)
    unknown.started(0, now=11.0)
    unknown.tokens(1, 15.0)
    assert metrics.request_interference_time.count == 1

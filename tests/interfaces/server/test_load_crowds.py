"""Loads of many connections in small: that every one is answered rightly, and that what is wrong is said. No times."""

import asyncio
import resource
import socket

import pytest
from tests.support.load import concurrent as streams_load
from tests.support.load import fair as fair_load
from tests.support.load import overload as overload_load
from tests.support.load import servers
from tests.support.load.concurrent import concurrent
from tests.support.load.fair import fair
from tests.support.load.figures import bucket_of, buckets, percentile, percentiles
from tests.support.load.idle import answered_badly, idle
from tests.support.load.probe import Probe
from tests.support.load.streams import Seen

from quire.errors import UserError

# a busy machine may miss them
TIMES = {
    "/health/live p99", "/health/live p100", "event loop p99", "time of others", "slow connections live too long",
    "time of a short request",
}  # fmt: skip


@pytest.fixture
def unused_place():
    """Where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


def test_percentiles():
    assert [percentile(range(1000), percent) for percent in (0, 50, 99, 100)] == [0, 500, 990, 999]
    assert percentile([], 99) == 0
    assert percentiles([]) == {"count": 0, "p50": 0, "p99": 0, "p100": 0}
    assert percentiles([float(value) for value in range(101)]) == {"count": 101, "p50": 50, "p99": 99, "p100": 100}


def test_a_p99_of_few_is_said_to_be_the_maximum():
    few = {"count": 2, "p50": 3.0, "p99": 3.0, "p100": 3.0, "p99_is": "the maximum of 2"}
    assert percentiles([3.0, 1.0]) == few
    assert percentiles([float(value) for value in range(100)])["p99_is"] == "the maximum of 100"
    seen = [Seen(status, None, 0.5, 1, is_done=True, silence=0.0) for status in [200] * 101 + [429] * 3]
    summary = overload_load._summary(4, seen, *[{"ended": 0.0, "rejected": 0.0, "mib": 1.0}] * 2)
    assert summary["refusal_p99_is"] == "the maximum of 3"
    assert "first_token_p99_is" not in summary
    for count, said in ((7, {"p99_is": "the maximum of 7"}), (100, {})):
        lags = buckets({}, {f'lag_bucket{{le="{bound}"}}': float(count) for bound in ("0.1", "+Inf")}, "lag")
        assert lags == {"count": count, "p50": 0.1, "p99": 0.1, "p100": 0.1, **said}


def test_a_bucket_is_found_of_what_came_between_two_looks():
    def look(*counts):
        bounds = ("0.01", "0.1", "+Inf")
        series = {
            f'lag_bucket{{le="{bound}",model_name="a"}}': count for bound, count in zip(bounds, counts, strict=True)
        }
        return {**series, "lag_count": counts[-1], 'lag_of_others_bucket{le="0.01"}': 7.0}

    assert bucket_of(look(0, 50, 50), look(98, 148, 150), "lag", 50) == 0.01
    assert bucket_of(look(0, 50, 50), look(98, 149, 150), "lag", 99) == 0.1
    assert bucket_of(look(0, 50, 50), look(98, 149, 150), "lag", 100) == float("inf")
    assert bucket_of(look(1, 1, 1), look(1, 1, 1), "lag", 99) == 0


def test_more_connections_than_the_system_allows_are_refused(monkeypatch):
    limits, given = [1000, 4000], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: given.append(pair))
    servers.allow_connections(500)
    assert given == []
    servers.allow_connections(3000)
    assert given == [(3128, 4000)]
    with pytest.raises(UserError, match=r"4,128 file descriptors .* may have 4,000"):
        servers.allow_connections(4000)


def test_streams_beside_long_prompts(monkeypatch):
    monkeypatch.setattr(streams_load, "_LONG_BYTES", 20_000)
    figures = concurrent("null", 16, num_waves=2, num_long=2)
    assert figures["statuses"] == {200: 32}
    long = figures["long_prompts"]
    assert set(long["statuses"]) <= {200}
    assert 2 <= sum(long["statuses"].values()) + long["left"] <= 4
    assert figures["health_seconds"]["count"] > 0
    assert set(figures["failed"]) <= TIMES


def test_a_long_prompt_without_an_answer_is_wrong(unused_place):
    load = streams_load._Concurrent(unused_place)
    asyncio.run(load._ask_long())
    [wrong] = load._wrong
    assert wrong.startswith("a long prompt: ConnectionRefusedError")


def test_idle_and_slow_connections():
    figures = idle("null", 20, 5, 1.0, first_byte_seconds=1.0)
    assert figures["loris_closed_after"]["count"] >= 5
    assert figures["seconds_alone"]["count"] > 0 < figures["seconds_beside"]["count"]
    assert set(figures["failed"]) <= TIMES


def test_connections_that_were_not_answered_are_counted():
    assert answered_badly(5, 5, 5) == []
    assert answered_badly(5, 4, 2) == [("no answer", 1), ("no answer after a time of idleness", 3)]


def test_one_short_among_long_prompts():
    figures = fair("paced", 3, 0.5, 0)
    assert set(figures["long_prompts"]) == {200}
    assert figures["prompt_tokens"] > 8000
    assert set(figures["failed"]) <= TIMES


def test_who_waits_in_silence_or_ends_badly_is_found():
    quick = Probe([0.1, 0.1])
    good = Seen(200, None, 0.1, 8, is_done=True, silence=0.1)
    refused = Seen(503, 4, 0.1, 0, is_done=False, silence=0.1)
    assert fair_load._failed(quick, quick, [good, refused]) == []
    assert fair_load._failed(quick, Probe([0.1, 2.1]), [good]) == ["time of a short request"]
    assert fair_load._failed(quick, Probe([0.1], ["status 503"]), [good]) == ["status 503"]
    silent = Seen(200, None, 61.0, 8, is_done=True, silence=61.0)
    assert fair_load._failed(quick, quick, [silent]) == ["somebody waited in silence"]
    for bad in (
        Seen(200, None, 0.1, 8, False, 0.1),
        Seen(503, None, 0.1, 0, False, 0.1),
        Seen(500, 1, 0.1, 0, False, 0.1),
    ):
        assert fair_load._failed(quick, quick, [bad])

"""/v1/observe/*: what is shown, that it costs the same for any number of viewers, and that it shows no text."""

import asyncio
import base64
import json

import pytest

from quire.interfaces.server.observing.observed import FRESH_SECONDS, DecisionFeed, Shared
from quire.observability.block_summary import summary_of
from quire.observability.latest import Latest, quantile
from quire.observability.metrics import ServerMetrics
from quire.testing.fake_observation import observing_operations

SECRET = "a nonce that nobody may see 4711"


class Engine:
    """Answers controls from a small real core, and counts them."""

    def __init__(self) -> None:
        self.operations = observing_operations()
        self.calls: list[str] = []

    async def control(self, name, args=None):
        self.calls.append(name)
        return self.operations[name](**(args or {}))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_four_views(run, served):
    async def main():
        async with served() as server:
            state = (await server.http.get("/v1/observe/state")).json()
            assert state["model"] == {
                "name": "byte-model",
                "max_model_len": 512,
                "has_chat_template": True,
                "takes_images": False,
                "makes": "text",
            }
            assert [one["request"] for one in state["running"]] == [1, 2]
            assert [(one["request"], one["waits_for"]) for one in state["waiting"]] == [(3, "memory")]
            blocks = (await server.http.get("/v1/observe/blocks")).json()
            assert len(base64.b64decode(blocks["states"])) == blocks["num_blocks"] == 16
            assert len(base64.b64decode(blocks["owners"])) == 2 * blocks["num_blocks"]
            assert blocks["counts_by_state"]["shared"] == 3
            assert blocks["num_sharing_requests"] == 2
            assert "3 of them are shared by 2 conversations; 1 request waits for memory." in blocks["summary"]
            told = (await server.http.get("/v1/observe/decisions")).json()
            assert told["decisions"][0]["words"] == "request 1 arrived with 13 tokens"
            assert told["decisions"][-1]["kind"] == "turned_away"
            later = (await server.http.get(f"/v1/observe/decisions?since={told['next']}")).json()
            assert later["decisions"] == []
            trace = await server.http.get("/v1/observe/trace")
            assert "attachment" in trace.headers["content-disposition"]
            assert trace.json()["traceEvents"]

    run(main())


def test_nothing_that_was_said_is_shown(run, served):
    async def main():
        async with served() as server:
            await server.chat(SECRET, user=SECRET)
            for view in ("state", "blocks", "decisions", "trace"):
                response = await server.http.get(f"/v1/observe/{view}")
                assert response.status_code == 200
                assert "nonce" not in response.text

    run(main())


def test_a_hundred_viewers_cost_as_much_as_one(run):
    async def main():
        engine, clock, calls = Engine(), Clock(), []

        async def fetch():
            calls.append(clock.now)
            return await engine.control("observe_blocks")

        shared = Shared(FRESH_SECONDS, clock)
        answers = await asyncio.gather(*(shared.get(fetch) for _ in range(100)))
        assert len(calls) == 1
        assert all(answer is answers[0] for answer in answers)
        clock.now += FRESH_SECONDS / 2
        await shared.get(fetch)
        assert len(calls) == 1
        clock.now += FRESH_SECONDS
        await shared.get(fetch)
        assert len(calls) == 2

    run(main())


def test_a_failure_is_not_kept(run):
    async def main():
        shared = Shared(1000.0, Clock())

        async def fails():
            raise ValueError("not now")

        async def works():
            return 7

        with pytest.raises(ValueError, match="not now"):
            await shared.get(fails)
        assert await shared.get(works) == 7

    run(main())


def test_a_viewer_who_leaves_takes_nothing_away(run):
    async def main():
        shared, gate = Shared(1000.0, Clock()), asyncio.Event()

        async def fetch():
            await gate.wait()
            return "there"

        first, second = (asyncio.ensure_future(shared.get(fetch)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        gate.set()
        assert await second == "there"

    run(main())


def test_a_feed_goes_on_and_notices_another_engine(run):
    async def main():
        engine, feed = Engine(), DecisionFeed()
        await feed.refresh(engine)
        whole = feed.since(0)
        assert [one["number"] for one in whole["decisions"]] == list(range(whole["next"]))
        assert feed.since(whole["next"] - 2)["decisions"] == whole["decisions"][-2:]
        await feed.refresh(engine)
        assert feed.since(0) == whole
        # it has decided as much already
        one = (0, 1, 5.0, "arrived", 1, 0, 3, 1, "")
        answer = {"now": 6.0, "began": 4.0, "first": 0, "next": whole["next"] + 1, "decisions": [one]}
        engine.operations["recent_decisions"] = lambda since: answer
        await feed.refresh(engine)
        anew = feed.since(0)
        assert (anew["epoch"], anew["now"]) == (2, 6.0)
        assert [decision["words"] for decision in anew["decisions"]] == ["request 1 arrived with 3 tokens"]

    run(main())


def test_a_trace_needs_a_recorder(run, served):
    async def main():
        async with served() as server:
            # configurations are frozen; this one is of this test alone
            object.__setattr__(server.engine.config, "recorder_bytes", 0)
            response = await server.http.get("/v1/observe/trace")
            assert response.status_code == 409
            assert response.json()["error"]["code"] == "not_recorded"

    run(main())


@pytest.mark.parametrize("since", ["-1", "x", "1.5"])
def test_a_wrong_number_is_refused(run, served, since: str):
    async def main():
        async with served() as server:
            response = await server.http.get(f"/v1/observe/decisions?since={since}")
            assert response.status_code == 400
            assert json.loads(response.text)["error"]["param"] == "since"

    run(main())


# ---------------------------------------------------------------------------------------------- numbers and words


def test_rates_and_latencies_are_of_the_last_seconds():
    metrics, clock = ServerMetrics(), Clock()
    latest = Latest(metrics, clock)
    metrics.generation_tokens.add(1000)
    clock.now += 100.0
    assert latest.numbers()["throughput"]["generated_tokens_per_second"] == pytest.approx(10.0)
    metrics.generation_tokens.add(50)
    metrics.time_to_first_token.observe(0.03)
    clock.now += 5.0
    numbers = latest.numbers()
    assert numbers["throughput"]["generated_tokens_per_second"] == pytest.approx(10.0)
    assert numbers["latency"]["time_to_first_token"]["count"] == 1
    assert 0.02 <= numbers["latency"]["time_to_first_token"]["p50_seconds"] <= 0.04
    assert numbers["latency"]["between_tokens"] is None
    for _ in range(8):
        clock.now += 5.0
        numbers = latest.numbers()
    assert numbers["throughput"]["generated_tokens_per_second"] == 0.0
    assert numbers["latency"]["time_to_first_token"] is None, "it was longer ago than is shown"


def test_a_quantile_lies_within_its_bucket():
    assert quantile((1.0, 2.0, 4.0), (0, 10, 0, 0), 0.5) == pytest.approx(1.5)
    assert quantile((1.0, 2.0, 4.0), (5, 0, 5, 0), 0.95) == pytest.approx(3.8)
    assert quantile((1.0, 2.0, 4.0), (0, 0, 0, 3), 0.5) == 4.0


def observed(**changed):
    counts = {"free": 90, "cached": 0, "own": 10, "shared": 0, "kept": 0, "pinned": 0}
    return {
        "num_blocks": 100, "counts_by_state": counts, "num_sharing_requests": 0, "num_host_blocks_used": 0,
        "waiting_for": {"turn": 0, "input": 0}, **changed,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changed, said",
    [
        ({}, "10 % of 100 blocks are in use; nothing waits."),
        (
            {
                "counts_by_state": {"free": 0, "cached": 1, "own": 60, "shared": 39, "kept": 0, "pinned": 0},
                "num_sharing_requests": 12,
                "waiting_for": {"memory": 3, "input": 1},
            },
            "99 % of 100 blocks are in use; 39 of them are shared by 12 conversations; 1 block of earlier prompts is "
            "kept for reuse; 3 requests wait for memory; 1 request waits for more of its prompt.",
        ),
        ({"num_blocks": 5000, "counts_by_state": {"free": 4990, "cached": 0, "own": 10, "shared": 0}},
         "under 1 % of 5,000 blocks are in use; nothing waits."),
        ({"waiting_for": {"rows": 1, "input": 0}, "num_host_blocks_used": 4},
         "10 % of 100 blocks are in use; 4 blocks are in swap space; 1 request waits for a place in the batch."),
    ],
)  # fmt: skip
def test_the_cache_in_one_sentence(changed: dict, said: str):
    assert summary_of(observed(**changed)) == said

"""AsyncLLM over a core without a model: streams, labels, aborts, deaths."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest

from quire import (
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    EngineError,
    RequestError,
    RequestFailedError,
    SamplingParams,
)
from quire.testing.fake_llm import fake_async_llm, fake_renderer

LINKS = pytest.mark.parametrize("own_process", [False, True], ids=["thread", "socket"])


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **changes})


def run(scenario: Callable, own_process: bool = False) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), fake_async_llm(own_process=own_process) as engine:
            await scenario(engine)

    asyncio.run(main())


@LINKS
def test_outputs_grow_until_they_are_finished(own_process: bool):
    async def scenario(engine: AsyncLLM) -> None:
        outputs = [output async for output in engine.generate("one two three", greedy(), "mine")]
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {"mine"}
        last = outputs[-1]
        assert last.prompt == "one two three"
        assert last.outputs[0].token_ids == (last.prompt_token_ids * 6)[:6]
        assert last.outputs[0].text == fake_renderer().decode(last.outputs[0].token_ids)
        assert engine.num_open_requests == 0

    run(scenario, own_process)


def test_earlier_outputs_do_not_change():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 1})
        stream = engine.generate("one two", greedy(logprobs=1))
        first = await anext(stream)
        await engine.control("hold")
        async for _ in stream:
            pass
        assert len(first.outputs[0].token_ids) == len(first.outputs[0].logprobs) == 1
        assert not first.finished

    run(scenario)


def test_deltas_add_up_to_the_whole():
    async def scenario(engine: AsyncLLM) -> None:
        sampling = greedy(n=2, max_tokens=9, logprobs=1, prompt_logprobs=0, stop=["three one t"])
        async for output in engine.generate("one two three", sampling):
            whole = output
        for index in (0, 1):
            deltas = [
                output async for output in engine.generate("one two three", sampling, delta=True)
                if output.outputs[0].index == index
            ]  # fmt: skip
            parts = [output.outputs[0] for output in deltas]
            wanted = whole.outputs[index]
            assert "".join(part.text for part in parts) == wanted.text
            assert list(chain.from_iterable(part.token_ids for part in parts)) == wanted.token_ids
            assert list(chain.from_iterable(part.logprobs for part in parts)) == wanted.logprobs
            assert sum(part.cumulative_logprob for part in parts) == pytest.approx(wanted.cumulative_logprob)
            assert parts[-1].finish_reason == wanted.finish_reason
        assert whole.prompt_logprobs[0] is None
        assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids)

    run(scenario)


@LINKS
def test_a_stop_string_ends_the_stream_and_the_sequence(own_process: bool):
    async def scenario(engine: AsyncLLM) -> None:
        prompt = "The quick brown fox jumps over the lazy dog"
        deltas = [delta async for delta in engine.stream(prompt, greedy(max_tokens=200, stop=["own fox ju"]))]
        assert "".join(delta.text for delta in deltas) == "The quick br"
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "own fox ju")
        assert (await engine.statistics())["sequences_running"] == 0
        assert engine.num_open_requests == 0

    run(scenario, own_process)


def test_a_reader_that_leaves_aborts_its_request():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 3})
        for method in (engine.generate, engine.stream):
            async with contextlib.aclosing(method("one two", greedy(), "label")) as stream:
                await anext(stream)
        assert (await engine.statistics())["sequences_aborted"] == 2
        assert engine.num_open_requests == 0
        assert len(engine._labels) == 0

    run(scenario)


def test_a_cancelled_reader_aborts_its_request():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 3})
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.stream("one two", greedy()):
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.statistics())["sequences_aborted"] == 1

    run(scenario)


def test_an_abort_by_label_ends_those_that_bear_it():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})

        async def last_reason(label: str | None) -> str | None:
            async for output in engine.generate("one two", greedy(), label):
                begun.append(label)
                reason = output.outputs[0].finish_reason
            return reason

        begun: list[str | None] = []
        tasks = [asyncio.create_task(last_reason(label)) for label in ("a", "a", "b", None)]
        while len(begun) < 4:
            await asyncio.sleep(0)
        await engine.abort("a")
        await engine.abort("nobody's")
        assert await asyncio.gather(*tasks[:2]) == ["abort", "abort"]
        await engine.control("hold")
        assert await asyncio.gather(*tasks[2:]) == ["length", "length"]

    run(scenario)


def test_many_requests_may_bear_one_label():
    async def scenario(engine: AsyncLLM) -> None:
        async def tokens(count: int) -> int:
            stream = engine.generate("one two", greedy(max_tokens=count), "same")
            return max([len(output.outputs[0].token_ids) async for output in stream])

        assert await asyncio.gather(*map(tokens, range(1, 50))) == list(range(1, 50))
        assert len(engine._labels) == 0

    run(scenario)


def test_bad_requests_raise_before_they_start():
    async def scenario(engine: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await engine.prepare([], greedy())
        with pytest.raises(RequestError, match="at most 20"):
            await engine.prepare("one", greedy(logprobs=21))
        with pytest.raises(RequestError):
            await anext(engine.generate({"prompt": 5}))
        prepared = await engine.prepare("one two", greedy())
        assert engine.num_open_requests == 0
        assert [delta async for delta in engine.stream(prepared)][-1].finish_reason == "length"

    run(scenario)


def test_a_prepared_request_runs_once_at_a_time():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})
        prepared = await engine.prepare("one two", greedy())
        first = engine.generate(prepared, request_id="mine")
        await anext(first)
        with pytest.raises(RequestError, match="running already"):
            await anext(engine.generate(prepared, request_id="mine"))
        assert engine._labels.count("mine") == 1
        await engine.control("hold")
        assert [output async for output in first][-1].finished
        assert [output async for output in engine.generate(prepared)][-1].finished

    run(scenario)


def test_a_prepared_request_has_its_parameters_already():
    async def scenario(engine: AsyncLLM) -> None:
        prepared = await engine.prepare("one two", greedy())
        beams = BeamSearchParams(beam_width=2)
        for call, name in (
            (engine.generate(prepared, greedy(max_tokens=9)), "sampling_params"),
            (engine.stream(prepared, priority=3), "priority"),
        ):
            with pytest.raises(RequestError, match=f"{name}: given for a request that was prepared"):
                await anext(call)
        with pytest.raises(RequestError, match="prepared or received already"):
            await engine.beam_search(prepared, beams)
        searching = await engine.prepare("one two", beams)
        assert searching.as_it_is(beams, 0) is searching
        with pytest.raises(RequestError, match="sampling_params"):
            searching.as_it_is(beams.replace(beam_width=3), 0)

    run(scenario)


def test_long_texts_are_tokenised_beside_the_loop():
    async def scenario(engine: AsyncLLM) -> None:
        text = "one two three " * 1000
        with pytest.raises(RequestError, match="maximum context length"):
            await engine.prepare(text)
        assert (await engine.prepare(text[:200])).prompt == text[:200]

    run(scenario)


def test_a_request_that_fails_raises_in_its_stream():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})
        stream = engine.stream("one two", greedy())
        await anext(stream)
        await engine.control("fail_requests", {"error": "not finite"})
        with pytest.raises(RequestFailedError, match="not finite"):
            async for _ in stream:
                pass
        await engine.control("hold")
        assert [delta async for delta in engine.stream("one", greedy())][-1].finish_reason == "length"

    run(scenario)


@LINKS
def test_a_dead_engine_is_seen(own_process: bool):
    async def scenario(engine: AsyncLLM) -> None:
        assert engine.is_running
        assert not engine.errored
        await engine.control("fail_next_step")
        with pytest.raises(EngineDeadError, match="told to fail"):
            await anext(engine.generate("one", greedy()))
        assert engine.errored
        assert not engine.is_running
        assert "told to fail" in (engine.dead_reason or "")

    run(scenario, own_process)


def test_after_shutdown_it_says_so():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})
        stream = engine.stream("one two", greedy())
        await anext(stream)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(engine.generate("one"))
        assert not engine.is_running
        assert not engine.errored  # it was asked to

    run(scenario)


def test_starting_is_done_once_however_many_ask():
    async def scenario() -> None:
        engine = fake_async_llm()
        with pytest.raises(EngineError, match="not started"):
            _ = engine.ready
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(engine.start() for _ in range(5)))
        assert len({id(ready) for ready in answers}) == 1
        engine.shutdown()

    asyncio.run(scenario())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def scenario() -> None:
        engine = fake_async_llm(own_process=True, core="quire.testing.fake_core:build_for_ever")
        client = engine._client
        task = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client is not None
        assert client.failure is not None

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_forgotten_is_not_kept_by_who_tells_it_of_losses():
    async def main() -> None:
        engine = fake_async_llm()
        kept: list[Any] = []
        engine._client.watch_losses = kept.append
        await engine.start()
        losses: list[Any] = []
        engine.watch_losses(losses.append)
        kept[0]("a loss")
        assert losses == ["a loss"]
        is_alive = weakref.ref(engine)
        del engine
        gc.collect()
        assert is_alive() is None
        kept[0]("another")
        assert losses == ["a loss"]

    asyncio.run(main())

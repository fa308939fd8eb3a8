"""Prompts that arrive in pieces, over a core without a model: what is sent when, and every way it may end."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ContextLengthError,
    EngineDeadError,
    RequestError,
    RequestFailedError,
    SamplingParams,
)
from quire.testing.fake_engine import FakeAsyncLLM, fake_engine
from quire.testing.fake_llm import fake_async_llm, fake_llm


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **changes})


@pytest.fixture
def run(tmp_path):
    """run(scenario): on an engine whose tokens are bytes and whose answers say how long the prompt was."""

    def on_a_loop(scenario: Callable, **checkpoint: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(60):
                engine = await fake_engine(tmp_path, **checkpoint)
                try:
                    await scenario(engine)
                    assert engine.num_open_requests == 0
                    assert len(engine._labels) == 0
                    while engine.fake.running:
                        await asyncio.sleep(0)
                finally:
                    engine.shutdown()

        asyncio.run(main())

    return on_a_loop


class Pieces:
    """An iterator that a test feeds; knows whether it was closed."""

    def __init__(self, *pieces: object) -> None:
        self._queue: asyncio.Queue = asyncio.Queue()
        self.is_closed = False
        for piece in pieces:
            self.put(piece)

    def put(self, piece: object) -> None:
        self._queue.put_nowait(piece)

    def end(self) -> None:
        self._queue.put_nowait(StopAsyncIteration)

    def __aiter__(self):
        return self

    async def __anext__(self):
        piece = await self._queue.get()
        if piece is StopAsyncIteration:
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def aclose(self) -> None:
        self.is_closed = True


def ended(*pieces: object) -> Pieces:
    given = Pieces(*pieces)
    given.end()
    return given


async def last_of(stream):
    last = None
    async for one in stream:
        last = one
    return last


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def prompt_so_far(engine: FakeAsyncLLM) -> bytes:
    """What the core has of the request that was sent last."""
    return bytes(engine.fake.requests[-1].prompt_token_ids) if engine.fake.requests else b""


@pytest.mark.parametrize(
    "pieces",
    [["Hello", " wor", "ld"], ["H", "ello world"], ["Hello world"], ["", "Hello world", ""], [[72, 101], b"llo world"]],
)
def test_the_outcome_is_that_of_the_whole(run, pieces):
    async def scenario(engine: AsyncLLM) -> None:
        is_text = isinstance(pieces[0], str)
        given = pieces if is_text else [[72, 101], list(b"llo world")]
        streamed = await last_of(engine.generate(ended(*given), greedy(n=2), "mine"))
        whole = await last_of(engine.generate("Hello world" if is_text else list(b"Hello world"), greedy(n=2), "mine"))
        assert streamed == whole
        assert streamed.prompt_token_ids == list(b"Hello world")

    run(scenario)


def test_forms_of_tokens(run):
    async def scenario(engine: AsyncLLM) -> None:
        import numpy as np

        wanted = await last_of(engine.generate([1, 2, 3, 4, 5], greedy(), "mine"))
        given = ended(1, [2], (3,), [], np.int64(4), np.array([5]))
        assert await last_of(engine.generate(given, greedy(), "mine")) == wanted

    run(scenario)


def test_an_async_generator(run):
    async def scenario(engine: AsyncLLM) -> None:
        async def spoken():
            for word in ("one", " two", " three"):
                await asyncio.sleep(0)
                yield word

        output = await last_of(engine.generate(spoken(), greedy()))
        assert output.prompt == "one two three"
        assert output.outputs[0].text.startswith("Answer 0 to 13 tokens")

    run(scenario)


def test_what_is_settled_is_sent_at_once(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        pieces = Pieces("one two")
        task = asyncio.create_task(last_of(engine.generate(pieces, greedy())))
        await until(lambda: prompt_so_far(engine) == b"one")
        pieces.put(" thr")
        await until(lambda: prompt_so_far(engine) == b"one two")
        pieces.put("ee")
        for _ in range(50):
            await asyncio.sleep(0)
        assert prompt_so_far(engine) == b"one two"
        assert not engine.fake.requests[0].is_final
        pieces.end()
        assert (await task).outputs[0].text.startswith("Answer 0 to 13 tokens")
        assert len(engine.fake.requests) == 1
        assert pieces.is_closed

    run(scenario)


def test_the_end_brings_the_last_token(run):
    """Else it would have to be computed twice: only the end asks for its logits."""

    async def scenario(engine: FakeAsyncLLM) -> None:
        pieces = Pieces([1, 2, 3])
        task = asyncio.create_task(last_of(engine.generate(pieces, greedy())))
        await until(lambda: prompt_so_far(engine) == bytes([1, 2]))
        pieces.put(4)
        await until(lambda: prompt_so_far(engine) == bytes([1, 2, 3]))
        pieces.end()
        assert (await task).prompt_token_ids == [1, 2, 3, 4]
        # what comes at once is one request
        await last_of(engine.generate(ended([1, 2], [3]), greedy()))
        assert engine.fake.requests[-1].prompt_token_ids == [1, 2, 3]
        assert engine.fake.requests[-1].is_final

    run(scenario)


def test_pieces_that_come_together_go_together(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        extensions = []
        extend = engine._client.extend
        engine._client.extend = lambda *args, **kwargs: (extensions.append(args), extend(*args, **kwargs))

        async def eager():
            for token in range(200):
                yield token

        await last_of(engine.generate(eager(), greedy()))
        assert len(extensions) <= 200 // 64 + 1

    run(scenario)


def test_a_wrong_guess_is_sent_again(run):
    """The end shows that other tokens are right: the outcome is the whole's all the same."""

    async def scenario(engine: FakeAsyncLLM) -> None:
        sampling = greedy(n=2, logprobs=1)
        whole = await last_of(engine.generate("one two", sampling, "mine"))
        open_text = engine.renderer.open_text

        def open_wrong_text(**options):
            growing = open_text(**options)
            push = growing.push

            def push_wrong(text):
                tokens = push(text)
                growing.token_ids[-1:] = [7]
                return [*tokens[:-1], 7]

            growing.push = push_wrong
            return growing

        engine.renderer.open_text = open_wrong_text
        pieces = Pieces("one two")
        task = asyncio.create_task(last_of(engine.generate(pieces, sampling, "mine")))
        await until(lambda: len(engine.fake.requests) == 2)
        pieces.end()
        assert await task == whole
        first, second = engine.fake.requests[1:]
        assert first.seed == second.seed
        assert engine.fake.aborted == [first.request_id]
        assert engine._labels.count("mine") == 0

    run(scenario)


def test_a_long_text_is_sent_before_it_was_looked_at(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        text = "some words and more of them " * 300
        output = await last_of(engine.generate(ended(text[:5000], text[5000:8000], text[8000:]), greedy()))
        assert output.prompt == text
        assert output.prompt_token_ids == list(text.encode())
        assert len(engine.fake.requests) == 1

    run(scenario, max_model_len=20_000)


# ---------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("pieces", [["one two"], []])
def test_a_reader_that_leaves(run, method, pieces):
    async def scenario(engine: FakeAsyncLLM) -> None:
        given = Pieces(*pieces)
        task = asyncio.create_task(last_of(getattr(engine, method)(given, greedy(), "mine")))
        await until(lambda: prompt_so_far(engine) == (b"one" if pieces else b"") and engine._labels.count("mine"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert given.is_closed
        assert engine.fake.aborted == [request.request_id for request in engine.fake.requests]

    run(scenario)


def test_a_reader_that_leaves_after_the_prompt(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        engine.fake.hold(2)
        async with contextlib.aclosing(engine.stream(ended("one two"), greedy())) as stream:
            await anext(stream)
        assert len(engine.fake.aborted) == 1

    run(scenario)


@pytest.mark.parametrize("pieces", [["one two"], []])
def test_an_abort_by_label(run, pieces):
    async def scenario(engine: FakeAsyncLLM) -> None:
        given = Pieces(*pieces)
        task = asyncio.create_task(last_of(engine.generate(given, greedy(n=2), "mine")))
        await until(lambda: prompt_so_far(engine) == (b"one" if pieces else b"") and engine._labels.count("mine"))
        await engine.abort("mine")
        output = await task
        assert [one.finish_reason for one in output.outputs] == ["abort", "abort"]
        assert given.is_closed

    run(scenario)


def test_an_iterator_that_raises(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        given = Pieces("one two", ZeroDivisionError("the microphone"))
        with pytest.raises(ZeroDivisionError, match="microphone"):
            await last_of(engine.stream(given, greedy()))
        assert engine.fake.aborted == [request.request_id for request in engine.fake.requests]

    run(scenario)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "ended without a piece"),
        ([""], "no tokens"),
        ([[]], "no tokens"),
        (["one", [1]], "Give one kind"),
        ([[1], "one two"], "Give one kind"),
        ([b"one"], "type bytes"),
        ([None], "type NoneType"),
        ([True], "type bool"),
        ([[1], [2, 999]], "prompt_token_ids"),
        ([["a"]], "type list"),
        ([[1, "a"]], "prompt_token_ids"),
        (["half of \ud83d a character"], "surrogate"),
    ],
)
def test_bad_pieces(run, pieces, words):
    async def scenario(engine: FakeAsyncLLM) -> None:
        given = ended(*pieces)
        with pytest.raises(RequestError, match=words):
            await last_of(engine.stream(given, greedy()))
        assert given.is_closed

    run(scenario)


def test_bad_parameters_are_found_before_the_first_piece(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        with pytest.raises(RequestError, match="at most 20"):
            await last_of(engine.stream(Pieces(), greedy(logprobs=21)))

    run(scenario)


def test_a_prompt_that_grows_beyond_the_model(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        async def endless(piece):
            while True:
                yield piece
                await asyncio.sleep(0)

        for piece in ("word ", [1, 2, 3]):
            with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens"):
                await last_of(engine.stream(endless(piece), greedy()))
        with pytest.raises(ContextLengthError):
            await last_of(engine.stream(ended("word " * 10_000), greedy()))

    run(scenario, max_model_len=64)


def test_a_request_that_the_core_refuses_meanwhile(run):
    """An extension may show that it can never run. Whoever is still speaking is told at once."""

    async def scenario(engine: FakeAsyncLLM) -> None:
        engine.fake.core.refusal = "KV cache: too small"
        given = Pieces("one two")
        with pytest.raises(RequestError, match="too small"):
            await last_of(engine.stream(given, greedy(n=2)))
        assert given.is_closed

    run(scenario)


def test_a_request_that_fails_after_its_prompt(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        engine.fake.failures[0] = "broken"
        with pytest.raises(RequestFailedError, match="broken"):
            await last_of(engine.stream(ended("one two"), greedy()))

    run(scenario)


def test_the_death_of_the_engine(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        given = Pieces("one two")
        task = asyncio.create_task(last_of(engine.stream(given, greedy())))
        await until(lambda: prompt_so_far(engine) == b"one")
        engine.fake.die("no memory")
        with pytest.raises(EngineDeadError, match="no memory"):
            await task
        assert given.is_closed
        engine.fake.core._sequences.clear()

    run(scenario)


def test_an_iterator_that_stalls_stops_nobody(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        given = Pieces("one two")
        task = asyncio.create_task(last_of(engine.generate(given, greedy())))
        await until(lambda: prompt_so_far(engine) == b"one")
        for _ in range(3):
            assert (await last_of(engine.generate("other", greedy()))).finished
        assert not task.done()
        given.end()
        assert (await task).finished

    run(scenario)


def test_an_iterator_that_never_waits_stops_nobody(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        is_over = False

        async def busy():
            while not is_over:
                yield ""
            yield "end"

        task = asyncio.create_task(last_of(engine.generate(busy(), greedy())))
        assert (await last_of(engine.generate("other", greedy()))).finished
        is_over = True
        assert (await task).finished

    run(scenario)


# ---------------------------------------------------------------------------------------------- received requests


def test_a_received_request_is_read_once(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        received = await engine.receive(ended("one two"), greedy())
        assert (received.prompt, received.request.prompt_token_ids) == ("one two", list(b"one two"))
        assert (await last_of(engine.generate(received))).finished
        with pytest.raises(RequestError, match="read once"):
            await last_of(engine.stream(received))

    run(scenario)


def test_a_received_request_that_nobody_reads(run):
    async def scenario(engine: FakeAsyncLLM) -> None:
        engine.fake.hold(1)
        received = await engine.receive(ended("one two"), greedy())
        await received.aclose()
        await received.aclose()
        assert len(engine.fake.aborted) == 1

    run(scenario)


def test_beams():
    async def main() -> None:
        async with asyncio.timeout(60), fake_async_llm() as engine:
            params = BeamSearchParams(beam_width=2, max_tokens=5)
            whole = await engine.beam_search("one two three", params)
            assert await engine.beam_search(ended("one t", "wo th", "ree"), params) == whole

    asyncio.run(main())


def test_where_iterators_are_not_taken():
    async def main() -> None:
        async with asyncio.timeout(60), fake_async_llm() as engine:
            with pytest.raises(RequestError, match=r"generate, stream or receive"):
                await engine.prepare(Pieces())
            with pytest.raises(RequestError, match="asynchronous iterator"):
                await anext(engine.generate(iter(["one"])))

    asyncio.run(main())
    with fake_llm() as llm:
        for given in (iter(["one"]), Pieces(), (word for word in ["one"])):
            with pytest.raises(RequestError, match="AsyncLLM"):
                llm.generate(given, use_tqdm=False)
            assert isinstance(llm, LLM)
        with pytest.raises(RequestError, match=r"Several prompts are a list: list\(prompts\)"):
            llm.generate(iter(["one", "two"]), use_tqdm=False)

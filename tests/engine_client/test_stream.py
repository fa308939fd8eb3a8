"""A request's stream: who is told, what is taken, and its ends."""

import asyncio
import gc
import weakref

import pytest

from quire.engine_client import AsyncEngineClient, each_of, items_of
from quire.errors import EngineDeadError
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_link

PROMPT = [5, 6, 7]
TOKENS = (PROMPT * 4)[:8]


def request(number: int = 1, **sampling) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    return EngineRequest(request_id=number, prompt_token_ids=list(PROMPT), sampling=params, seed=number)


def run(scenario) -> None:
    async def main() -> None:
        client = AsyncEngineClient(fake_link(own_process=False))
        try:
            async with asyncio.timeout(30):
                await client.wait_ready()
                await scenario(client)
        finally:
            client.close()

    asyncio.run(main())


def test_a_reader_is_told_and_takes():
    async def scenario(client: AsyncEngineClient) -> None:
        stream, tokens, over = client.open(request()), [], asyncio.Event()

        def told() -> None:
            assert stream.has_news
            for delta in stream.take():
                tokens.extend(delta.token_ids)
            assert not stream.has_news
            if stream.is_done:
                over.set()

        stream.tell(told)
        await over.wait()
        assert tokens == TOKENS
        assert list(stream.take()) == []
        await stream.aclose()
        assert client.num_open == 0

    run(scenario)


def test_whoever_does_not_take_is_told_once():
    async def scenario(client: AsyncEngineClient) -> None:
        stream, calls, other = client.open(request()), [], client.open(request(2, max_tokens=60))
        stream.tell(lambda: calls.append(1))
        async for _ in items_of(other):
            pass
        assert calls == [1]
        [delta] = stream.take()
        assert (delta.token_ids, delta.finish_reason, stream.is_done) == (TOKENS, "length", True)

    run(scenario)


def tokens_by_index(deltas) -> list[list[int]]:
    return [[token for delta in deltas if delta.index == index for token in delta.token_ids] for index in (0, 1)]


def test_each_item_is_used_in_its_turn():
    async def scenario(client: AsyncEngineClient) -> None:
        stream, deltas = client.open(request(n=2)), []
        await each_of(stream, deltas.append)
        await stream.aclose()
        waited = [delta async for delta in client.generate(request(2, n=2))]
        assert tokens_by_index(deltas) == tokens_by_index(waited)
        assert tokens_by_index(deltas)[0] == TOKENS

    run(scenario)


def test_a_stream_that_was_used_up_leaves_nothing_for_the_garbage_collector():
    class Use:
        def __call__(self, delta) -> None: ...

    async def scenario(client: AsyncEngineClient) -> None:
        stream, use = client.open(request()), Use()
        is_alive = weakref.ref(use)
        gc.disable()
        try:
            await each_of(stream, use)
            await stream.aclose()
            del stream, use
            assert not is_alive()
        finally:
            gc.enable()

    run(scenario)


def test_what_a_use_raises_is_raised():
    async def scenario(client: AsyncEngineClient) -> None:
        stream = client.open(request())

        def use(delta) -> None:
            raise ValueError("not this one")

        with pytest.raises(ValueError, match="not this one"):
            await each_of(stream, use)
        await stream.aclose()

    run(scenario)


def test_closing_aborts_once():
    async def scenario(client: AsyncEngineClient) -> None:
        await client.control("hold", {"at": 3})
        stream = client.open(request(n=2))
        await stream.aclose()
        await stream.aclose()
        assert client.num_open == 0
        assert (await client.control("statistics"))["sequences_aborted"] == 2

    run(scenario)


def test_what_came_before_the_end_of_the_engine_is_taken_first():
    async def scenario(client: AsyncEngineClient) -> None:
        await client.control("hold", {"at": 3})
        stream, told = client.open(request()), asyncio.Event()
        stream.tell(told.set)
        await told.wait()
        client.close()
        assert [token for delta in stream.take() for token in delta.token_ids][:1] == TOKENS[:1]
        assert stream.has_news
        with pytest.raises(EngineDeadError):
            stream.take()

    run(scenario)


def test_what_ends_a_stream_is_found_behind_what_came_before_it():
    async def scenario(client: AsyncEngineClient) -> None:
        await client.control("hold", {"at": 3})
        stream, told, deltas = client.open(request()), asyncio.Event(), []
        stream.tell(told.set)
        await told.wait()
        client.close()
        with pytest.raises(EngineDeadError):
            await each_of(stream, deltas.append)
        assert deltas[0].token_ids[:1] == TOKENS[:1]

    run(scenario)


def test_a_reader_that_fails_when_it_is_told_fails_alone(caplog):
    async def scenario(client: AsyncEngineClient) -> None:
        broken, tokens = client.open(request()), []

        def fail() -> None:
            raise ValueError("not this one")

        broken.tell(fail)
        await each_of(client.open(request(2)), lambda delta: tokens.extend(delta.token_ids))
        assert tokens == TOKENS
        assert "the reader of request 1 failed" in caplog.text

    run(scenario)


def test_a_sequence_that_its_reader_has_ended_does_not_fail_with_the_engine():
    async def scenario(client: AsyncEngineClient) -> None:
        await client.control("hold", {"at": 3})
        stream, told = client.open(request()), asyncio.Event()
        stream.tell(told.set)
        await told.wait()
        client.kill("The engine is gone.")
        stream.take()
        client.abort(1, 0)
        assert stream.is_done
        assert list(stream.take()) == []

    run(scenario)

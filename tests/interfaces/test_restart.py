"""An engine in the place of one that died: what lives on, and what does not. The core is a fake in its own process."""

import asyncio
import os
import signal

import pytest

from quire import SamplingParams
from quire.engine_client import AsyncEngineClient
from quire.errors import EngineDeadError
from quire.interfaces.async_llm import AsyncLLM
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm, fake_link

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def play():
    """Runs `test(engine)` on an engine whose successors are of the same kind."""

    def run(test) -> None:
        async def main() -> None:
            engine = fake_async_llm(own_process=True, core=KEEPING_CORE)
            engine._connect = lambda config: AsyncEngineClient(fake_link(own_process=True, core=KEEPING_CORE))
            try:
                async with asyncio.timeout(60):
                    await engine.start()
                    await test(engine)
            finally:
                engine.shutdown()

        asyncio.run(main())

    return run


async def kill(engine: AsyncLLM) -> None:
    os.kill(engine.processes[0].pid, signal.SIGKILL)
    while engine.dead_reason is None:
        await asyncio.sleep(0.01)


async def text_of(engine: AsyncLLM, prompt: str) -> str:
    return [output async for output in engine.generate(prompt, GREEDY)][-1].outputs[0].text


def test_requests_that_ran_end_and_new_ones_are_answered(play):
    async def test(engine: AsyncLLM) -> None:
        before = await text_of(engine, "one two")
        await engine.control("hold", {"at": 2})
        running = asyncio.ensure_future(text_of(engine, "one two"))
        while not engine.num_open_requests:
            await asyncio.sleep(0)
        await kill(engine)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await running
        # without a restart a dead engine stays dead
        with pytest.raises(EngineDeadError):
            await text_of(engine, "one two")
        assert engine.errored
        await engine.restart()
        assert engine.is_running
        assert await text_of(engine, "one two") == before

    play(test)


def test_pinned_prefixes_are_pinned_again_but_not_those_that_were_unpinned(play):
    async def test(engine: AsyncLLM) -> None:
        kept = await engine.pin_prefix("one two three four five", name="kept", cache_salt="tenant")
        await engine.pin_prefix("six seven eight", name="gone")
        await engine.unpin_prefix("gone")
        await kill(engine)
        await engine.restart()
        [again] = await engine.pinned_prefixes()
        assert (again.name, again.num_tokens) == ("kept", kept.num_tokens)

    play(test)


def test_a_session_goes_on_and_computes_its_past_again(play):
    async def test(engine: AsyncLLM) -> None:
        session = await engine.open_session()
        first = await session.generate("one two three", GREEDY)
        num_tokens = session.num_tokens
        await kill(engine)
        await engine.restart()
        second = await session.generate(" four", GREEDY)
        assert session.num_tokens > num_tokens
        assert session.token_ids[:num_tokens] == [*first.prompt_token_ids, *first.outputs[0].token_ids]
        computed = (await engine.statistics())["tokens_computed_total"]
        assert computed >= num_tokens
        # from here on it is kept again
        await session.generate(" five", GREEDY)
        assert (await engine.statistics())["tokens_computed_total"] - computed < num_tokens + len(second.outputs)
        await session.close()

    play(test)


def test_an_engine_that_was_shut_down_is_not_started_again(play):
    async def test(engine: AsyncLLM) -> None:
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.restart()

    play(test)


def test_a_living_engine_can_be_replaced(play):
    async def test(engine: AsyncLLM) -> None:
        pid = engine.processes[0].pid
        await engine.restart("a new one is wanted")
        assert engine.processes[0].pid != pid
        assert await text_of(engine, "one two")

    play(test)


def test_between_two_restarts_that_failed_nobody_else_starts_an_engine(play):
    async def test(engine: AsyncLLM) -> None:
        num_tries = 0
        connect = engine._connect

        def count(config):
            nonlocal num_tries
            num_tries += 1
            if num_tries == 1:
                raise OSError("no process to spare")
            return connect(config)

        engine._connect = count
        session = await engine.open_session()
        await session.generate("one two three", GREEDY)
        await kill(engine)
        restart = asyncio.ensure_future(engine.restart())
        # this one waits for the restart, and must not begin where it ended
        waiting = asyncio.ensure_future(engine.control("list_kept"))
        with pytest.raises(OSError, match="no process"):
            await restart
        with pytest.raises(EngineDeadError, match="has not started yet"):
            await waiting
        for call in (lambda: engine.control("list_kept"), lambda: text_of(engine, "one two")):
            with pytest.raises(EngineDeadError, match="has not started yet"):
                await call()
        # what it kept is gone in any case
        await session.close()
        assert num_tries == 1
        await engine.restart()
        assert num_tries == 2
        assert await text_of(engine, "one two")

    play(test)

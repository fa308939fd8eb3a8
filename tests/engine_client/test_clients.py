"""The client on every link, and one that blocks, against a core without a model."""

import asyncio
import contextlib
import os
import threading
from contextlib import contextmanager
from itertools import chain, count

import pytest
from tests.support.blocking_client import BlockingClient

from quire.engine_client import AsyncEngineClient, items_of
from quire.errors import EngineDeadError, EngineError, ModelError
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_link

PROMPT = [5, 6, 7]
LINKS = pytest.mark.parametrize("own_process", [False, True], ids=["in process", "socket"])
GREEDY = {"temperature": 0.0, "max_tokens": 8}


def request(number: int = 1, **sampling) -> EngineRequest:
    params = SamplingParams(**{**GREEDY, **sampling})
    return EngineRequest(request_id=number, prompt_token_ids=list(PROMPT), sampling=params, seed=number)


@contextmanager
def sync_client(own_process: bool, **options):
    client = BlockingClient(fake_link(own_process=own_process, **options))
    try:
        yield client
    finally:
        client.close()


def run_async(own_process: bool, scenario, **options) -> None:
    """Runs scenario(client, link) with a limit on hanging, and closes."""

    async def main() -> None:
        link = fake_link(own_process=own_process, **options)
        client = AsyncEngineClient(link)
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                await scenario(client, link)
        finally:
            client.close()

    asyncio.run(main())


def tokens_of_all(client: BlockingClient) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while client.num_open:
        for number, delta in client.receive():
            tokens.setdefault(number, []).extend(delta.token_ids)
    return tokens


async def wait_until_idle(client: AsyncEngineClient) -> None:
    while (await client.control("statistics"))["sequences_running"]:
        pass


# ---------------------------------------------------------------------------------------------- one that blocks


@LINKS
def test_requests_are_answered(own_process: bool):
    with sync_client(own_process) as client:
        assert client.ready.report == ["a core without a model"]
        client.add(request(1))
        client.add(request(2, max_tokens=2))
        assert tokens_of_all(client) == {1: [5, 6, 7, 5, 6, 7, 5, 6], 2: [5, 6]}


@LINKS
def test_an_aborted_request_is_gone(own_process: bool):
    with sync_client(own_process) as client:
        client.control("hold", {"at": 3})
        client.add(request(1))
        client.add(request(2, max_tokens=2))
        client.receive()
        client.abort([1])
        assert 1 not in tokens_of_all(client)
        statistics = client.control("statistics")
        assert (statistics["sequences_running"], statistics["sequences_aborted"]) == (0, 1)


@LINKS
def test_an_aborted_sequence_leaves_the_others(own_process: bool):
    with sync_client(own_process) as client:
        client.control("hold", {"at": 3})
        client.add(request(1, n=2, max_tokens=8))
        assert {delta.index for _, delta in client.receive()} == {0, 1}
        client.abort_sequence(1, 0)
        client.control("hold")
        later = []
        while client.num_open:
            later += [(delta.index, delta.finish_reason) for _, delta in client.receive()]
        assert {index for index, _ in later} == {1}
        assert later[-1] == (1, "length")


@LINKS
def test_what_comes_during_a_control_call_is_not_lost(own_process: bool):
    with sync_client(own_process) as client:
        client.add(request())
        for _ in range(10):
            client.control("statistics")
        assert tokens_of_all(client) == {1: [5, 6, 7, 5, 6, 7, 5, 6]}


@LINKS
def test_a_long_step_sees_what_arrives(own_process: bool):
    with sync_client(own_process) as client:
        client.control("await_arrival")
        numbers = count(1)
        # the step that waits goes on when one of these comes, or the next call
        while not client.control("statistics")["came_in_step"]:
            client.add(request(next(numbers)))
        assert all(len(tokens) == 8 for tokens in tokens_of_all(client).values())


@LINKS
def test_control_calls_answer_and_fail_alone(own_process: bool):
    with sync_client(own_process) as client:
        assert client.control("echo", {"a": [1, {"b": None}]}) == {"a": [1, {"b": None}]}
        with pytest.raises(EngineError, match="no such operation"):
            client.control("nonsense")
        with pytest.raises(EngineError, match="unexpected keyword"):
            client.control("statistics", {"a": 1})
        assert client.control("statistics")["steps"] == 0


@LINKS
def test_a_step_that_fails_ends_the_engine_with_its_reason(own_process: bool):
    with sync_client(own_process) as client:
        client.control("fail_next_step")
        client.add(request())
        with pytest.raises(EngineDeadError, match="RuntimeError: the step was told to fail"):
            tokens_of_all(client)
        with pytest.raises(EngineDeadError, match="told to fail"):
            client.add(request(2))


@LINKS
def test_a_users_mistake_in_the_core_stays_one(own_process: bool):
    with pytest.raises(ModelError, match="this checkpoint is broken"):
        BlockingClient(fake_link(own_process=own_process, core="quire.testing.fake_core:build_with_users_mistake"))


def test_our_own_mistake_in_the_process_names_itself():
    link = fake_link(own_process=True, core="quire.testing.fake_core:build_with_own_mistake")
    with pytest.raises(EngineError, match="could not start") as caught:
        BlockingClient(link)
    assert "ZeroDivisionError: the loader divides by zero" in str(caught.value)


def test_a_process_that_dies_while_it_starts_is_noticed():
    link = fake_link(own_process=True, core="quire.testing.fake_core:build_and_die")
    with pytest.raises(EngineDeadError, match="exit status 7"):
        BlockingClient(link)


def test_a_client_that_was_closed_says_so():
    with sync_client(own_process=False) as client:
        client.close()
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            client.add(request())


# ---------------------------------------------------------------------------------------------- asynchronous


@LINKS
def test_many_streams_at_once(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        async def one(number: int) -> list[int]:
            tokens = []
            async for delta in client.generate(request(number, max_tokens=number)):
                tokens += delta.token_ids
            return tokens

        answers = await asyncio.gather(*(one(number) for number in range(1, 60)))
        assert answers == [(PROMPT * 30)[:number] for number in range(1, 60)]
        assert client.num_open == 0

    run_async(own_process, scenario)


@LINKS
def test_a_slow_reader_gets_all_in_few_pieces(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        pieces = []
        async for delta in client.generate(request(max_tokens=200)):
            pieces.append(delta.token_ids)
            await wait_until_idle(client)  # busy while the core goes on to the end
        assert len(pieces) <= 2
        assert list(chain.from_iterable(pieces)) == (PROMPT * 70)[:200]

    run_async(own_process, scenario)


@LINKS
def test_a_reader_that_goes_away_aborts(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        await client.control("hold", {"at": 5})
        async with contextlib.aclosing(client.generate(request(n=2, max_tokens=50))) as stream:
            await anext(stream)
        assert client.num_open == 0
        assert (await client.control("statistics"))["sequences_aborted"] == 2

    run_async(own_process, scenario)


@LINKS
def test_an_abort_is_told_to_the_reader(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        await client.control("hold", {"at": 5})
        reasons = []
        async for delta in client.generate(request(max_tokens=50)):
            client.abort(1)
            reasons.append(delta.finish_reason)
        assert reasons[-1] == "abort"
        client.abort(1)
        client.abort(12345)
        await wait_until_idle(client)

    run_async(own_process, scenario)


@LINKS
def test_the_engines_death_reaches_every_reader(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        async def one(number: int) -> None:
            async for _ in client.generate(request(number, max_tokens=250)):
                pass

        await client.control("fail_next_step")
        deaths = await asyncio.gather(*(one(number) for number in range(1, 9)), return_exceptions=True)
        assert {type(death) for death in deaths} == {EngineDeadError}
        assert all("told to fail" in str(death) for death in deaths)
        assert len({id(death) for death in deaths}) == 8  # one of its own for each
        assert "told to fail" in (client.failure or "")
        with pytest.raises(EngineDeadError):
            await one(9)
        with pytest.raises(EngineDeadError):
            await client.control("statistics")

    run_async(own_process, scenario)


@LINKS
def test_a_call_in_flight_hears_of_the_death(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        call = asyncio.ensure_future(client.control("echo"))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            await call

    run_async(own_process, scenario)


@LINKS
def test_a_core_that_cannot_be_built_raises_in_wait_ready(own_process: bool):
    async def scenario(client: AsyncEngineClient, link) -> None:
        raise AssertionError("it became ready")

    with pytest.raises(ModelError, match="this checkpoint is broken"):
        run_async(own_process, scenario, core="quire.testing.fake_core:build_with_users_mistake")


@LINKS
def test_an_engine_may_outlive_its_event_loop(own_process: bool):
    client = AsyncEngineClient(fake_link(own_process=own_process))

    async def once() -> list[int]:
        await client.wait_ready()
        return [token async for delta in client.generate(request()) for token in delta.token_ids]

    try:
        assert asyncio.run(once()) == asyncio.run(once()) == [5, 6, 7, 5, 6, 7, 5, 6]
    finally:
        client.close()


def test_what_is_sent_in_one_turn_looks_for_answers_once(monkeypatch):
    async def scenario(client: AsyncEngineClient, link) -> None:
        looks = []
        receive = link.receive
        monkeypatch.setattr(link, "receive", lambda timeout: looks.append(timeout) or receive(timeout))
        streams = [client.open(request(number)) for number in range(1, 9)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # once for all that was sent, and once if an answer came meanwhile
        assert 1 <= len(looks) <= 2
        for stream in streams:
            assert [token async for delta in items_of(stream) for token in delta.token_ids] == [5, 6, 7, 5, 6, 7, 5, 6]
            await stream.aclose()
        # and again for the next turn
        looks.clear()
        await client.control("statistics")
        assert looks

    run_async(True, scenario)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts files through /proc")
@pytest.mark.parametrize(
    ("own_process", "is_async", "count"), [(False, False, 10), (False, True, 40), (True, False, 2), (True, True, 4)]
)
def test_engines_one_after_another_leak_nothing(own_process, is_async, count, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def once() -> None:
        if is_async:
            run_async(own_process, answer)
        else:
            with sync_client(own_process) as client:
                client.add(request())
                tokens_of_all(client)

    async def answer(client: AsyncEngineClient, link) -> None:
        async for _ in client.generate(request()):
            pass

    once()
    before = threading.active_count(), open_files()
    for _ in range(count):
        once()
    assert (threading.active_count(), open_files()) == before
    assert os.listdir(tmp_path) == []

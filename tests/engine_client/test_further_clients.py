"""A core that several processes use: each has its own requests, and takes nothing of the others with it."""

import asyncio
import gc
import os
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import zmq

from quire.engine_client import AsyncEngineClient
from quire.engine_client.attached_link import AttachedLink
from quire.engine_client.socket_link import SocketLink, endpoint_in, fresh_folder
from quire.engine_core.driver import CoreDriver
from quire.engine_core.further_clients import FurtherClients, parts_of
from quire.errors import EngineDeadError, EngineError
from quire.messages import (
    AbortRequests,
    CacheChanged,
    ControlCall,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    SequenceEnd,
    SequenceStart,
    client_of,
    first_request_id_of,
    sequence_id_of,
)
from quire.processes.arrivals import Arrivals
from quire.sampling_params import SamplingParams
from quire.testing.fake_core import FakeCore
from quire.testing.fake_llm import fake_link


def request(number: int, **sampling) -> EngineRequest:
    params = SamplingParams(temperature=0.0, **{"max_tokens": 6, **sampling})
    return EngineRequest(request_id=number, prompt_token_ids=[number % 100 + 1, 3], sampling=params)


async def attached(first: AsyncEngineClient, number: int) -> AsyncEngineClient:
    folder = fresh_folder()
    client = AsyncEngineClient(AttachedLink(folder))
    await first.control("clients.open", {"number": number, "endpoint": endpoint_in(folder)})
    ready = await client.wait_ready()
    assert ready.first_request_id == first_request_id_of(number)
    assert not os.path.exists(folder)
    return client


@asynccontextmanager
async def a_core():
    client = AsyncEngineClient(fake_link(own_process=True))
    try:
        async with asyncio.timeout(60):
            await client.wait_ready()
            yield client
    finally:
        client.close()


async def tokens_of(client: AsyncEngineClient, asked: EngineRequest) -> list[int]:
    return [token async for delta in client.generate(asked) for token in delta.token_ids]


def test_each_hears_its_own():
    async def main() -> None:
        async with a_core() as first:
            others = [await attached(first, number) for number in (1, 511)]
            clients = {0: first, 1: others[0], 511: others[1]}
            work = [
                tokens_of(client, request(first_request_id_of(number) + count))
                for count in range(20)
                for number, client in clients.items()
            ]
            answers = await asyncio.gather(*work)
            firsts = [first_request_id_of(number) + count for count in range(20) for number in clients]
            assert answers == [[one % 100 + 1, 3] * 3 for one in firsts]
            assert await others[0].control("echo", {"a": 1}) == {"a": 1}
            with pytest.raises(EngineError, match="no such operation"):
                await others[1].control("nothing")
            # what has ended is not remembered
            assert await first.control("clients.list") == {1: 0, 511: 0}
            for client in clients.values():
                assert client.statistics()["late_outputs_dropped"] == 0
            for client in others:
                client.close()

    asyncio.run(main())


def test_one_that_comes_later_hears_what_the_cache_holds():
    class FilledCore(FakeCore):
        def held_in_cache(self):
            return CacheChanged(stored=[3, 5])

    context = zmq.Context()
    clients = FurtherClients(context, zmq.Poller(), Arrivals())
    clients.serve(CoreDriver(FilledCore(vocab_size=300)))
    folder = fresh_folder()
    link = AttachedLink(folder)
    clients.open(1, endpoint_in(folder))
    messages = link.receive(10)
    while len(messages) < 2:
        messages += link.receive(10)
    assert [type(message) for message in messages] == [EngineReady, CacheChanged]
    assert messages[1].stored == [3, 5]
    link.close()
    clients.close()
    context.term()


def test_one_that_is_gone_has_its_requests_aborted_and_nobody_elses():
    async def main() -> None:
        async with a_core() as first:
            other, third = await attached(first, 1), await attached(first, 2)
            await first.control("hold", {"at": 2})
            mine, theirs = first_request_id_of(1), first_request_id_of(2)
            streams = {
                first.generate(request(7)): 7,
                other.generate(request(mine, n=3)): mine,
                other.generate(request(mine + 1)): mine + 1,
                third.generate(request(theirs)): theirs,
            }
            for stream in streams:
                await anext(stream)
            # as if its process had been killed: it says nothing
            other._unwatch()
            other._link.close()
            assert await first.control("clients.close", {"number": 1}) == 2
            assert await first.control("clients.close", {"number": 1}) == 0
            statistics = await first.control("statistics")
            assert (statistics["sequences_running"], statistics["sequences_aborted"]) == (2, 4)
            again = await attached(first, 3)
            await first.control("hold")
            for stream, number in streams.items():
                if client_of(number) != 1:
                    assert len([token async for delta in stream for token in delta.token_ids]) > 0
            assert len(await tokens_of(again, request(first_request_id_of(3)))) == 6
            again.close()
            third.close()

    asyncio.run(main())


def test_the_cores_last_word_reaches_all():
    async def main() -> None:
        async with a_core() as first:
            other = await attached(first, 1)
            await first.control("hold", {"at": 0})
            streams = [first.generate(request(1)), other.generate(request(first_request_id_of(1)))]
            waits = [asyncio.ensure_future(anext(stream)) for stream in streams]
            while (await first.control("statistics"))["sequences_running"] < 2:
                await asyncio.sleep(0)
            await first.control("fail_next_step")
            await first.control("hold")
            for wait in waits:
                with pytest.raises(EngineDeadError, match="told to fail"):
                    await wait
            other.close()

    asyncio.run(main())


def test_what_is_about_the_requests_of_others_is_refused(capfd):
    async def main() -> None:
        async with a_core() as first:
            other = await attached(first, 1)
            await first.control("hold", {"at": 2})
            stream = first.generate(request(7))
            came = list((await anext(stream)).token_ids)
            other._send(AbortRequests(request_ids=[7]))
            other._send(AbortRequests(sequence_ids=[sequence_id_of(7, 0)]))
            other._send(request(7))
            with pytest.raises(EngineError, match="by the word of the first"):
                await other.control("clients.close", {"number": 1})
            with pytest.raises(EngineError, match="must be a free one"):
                await first.control("clients.open", {"number": 1, "endpoint": "ipc:///nowhere"})
            await first.control("hold")
            came += [token async for delta in stream for token in delta.token_ids]
            assert came == [8, 3] * 3
            other.close()

    asyncio.run(main())
    assert capfd.readouterr().err.count("no message of its own") == 4


def test_a_frame_of_its_own_that_cannot_be_read_is_answered():
    async def main() -> None:
        async with a_core() as first:
            other = await attached(first, 1)
            broken = request(first_request_id_of(1))
            broken.sampling.ignore_eos = None  # type: ignore[assignment]
            [delta] = [delta async for delta in other.generate(broken)]
            assert delta.finish_reason == "error"
            assert "cannot read" in str(delta.error)
            other._link._socket.send(b"\x00garbage")
            assert await other.control("echo") == {}
            other.close()

    asyncio.run(main())


def test_a_link_that_nobody_met_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    link = AttachedLink(fresh_folder())
    assert os.listdir(tmp_path) != []
    link.send(ControlCall(call_id=1, name="echo"))
    assert link.receive(0.01) == []
    assert link.descriptors() != ()
    link.close()
    link.close()
    assert os.listdir(tmp_path) == []
    assert link.descriptors() == ()
    assert link.receive() == []


def test_a_link_that_is_forgotten_gives_everything_back(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    link = AttachedLink(fresh_folder())
    context = link._socket.context
    del link
    gc.collect()
    assert context.closed
    assert os.listdir(tmp_path) == []


def test_an_output_is_divided_without_loss():
    ids = [sequence_id_of(first_request_id_of(number) + 5, index) for number in (0, 3, 0, 511) for index in (0, 1)]
    whole = EngineOutputs(
        step=4,
        sequence_ids=np.array(ids),
        token_ids=np.arange(len(ids)),
        starts=[SequenceStart(ids[2], 1)],
        ends=[SequenceEnd(ids[0], "stop"), SequenceEnd(ids[-1], "length")],
    )
    parts = parts_of(whole)
    assert list(parts) == [0, 3, 511]
    assert {part.step for part in parts.values()} == {4}
    assert {number: part.token_ids.tolist() for number, part in parts.items()} == {
        0: [0, 1, 4, 5],
        3: [2, 3],
        511: [6, 7],
    }
    assert [len(part.ends) for part in parts.values()] == [1, 0, 1]
    assert len(parts[3].starts) == 1
    alone = msgspec.structs.replace(whole, sequence_ids=whole.sequence_ids[:2], starts=[], ends=[])
    assert parts_of(alone) == {0: alone}
    assert parts_of(alone)[0] is alone


def test_the_core_of_a_link_is_the_first_clients():
    link = fake_link(own_process=True)
    assert isinstance(link, SocketLink)
    [ready] = link.receive()
    assert ready.first_request_id == 0
    link.close()

"""Connections that have not said what they want: how many there may be, and who has to go."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from types import SimpleNamespace

import pytest

from quire.errors import OptionError
from quire.interfaces.gateway.app import http_server
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.listener import listen
from quire.interfaces.server.transport.unfinished import Descriptors, Unfinished, networks_of


class HandLoop:
    """Clocks that strike when a test says so."""

    def __init__(self):
        self.due = []

    def call_later(self, delay, callback, *args):
        clock = SimpleNamespace(delay=delay, strike=lambda: callback(*args), cancel=lambda: self.due.remove(clock))
        self.due.append(clock)
        return clock


class Beginner:
    head_seconds = 10.0

    def __init__(self, address="192.0.2.1", *, loop=None, is_answering=False, has_unread=False):
        self.has_unread = lambda: has_unread
        self.loop = loop or HandLoop()
        self.client = None if address is None else (address, 1234)
        self.is_answering = is_answering
        self.is_given_up = False

    def give_up(self):
        self.is_given_up = True
        return not self.is_answering


def begun(room: Unfinished, beginners: list[Beginner]) -> list[int]:
    """Which of them were given up when the last one had begun."""
    for beginner in beginners:
        room.begin(beginner)
    return [number for number, beginner in enumerate(beginners) if beginner.is_given_up]


def test_who_says_nothing_in_time_is_given_up():
    room, loop = Unfinished(), HandLoop()
    late = Beginner(loop=loop)
    in_time = Beginner(loop=loop)
    room.begin(late)
    room.begin(in_time)
    # it has begun already: the clock runs on
    room.begin(late)
    room.end(in_time)
    [clock] = loop.due
    assert clock.delay == late.head_seconds
    clock.strike()
    assert late.is_given_up
    assert not in_time.is_given_up
    assert room.statistics() == {"unfinished": 0, "addresses": 0, "idle": 0, "displaced": 0}


@pytest.mark.parametrize(
    ("addresses", "given_up"),
    [
        (["192.0.2.1"] * 3, []),
        (["192.0.2.1"] * 5, [0, 1]),
        (["192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.1"], [0]),
        (["127.0.0.1"] * 9, []),
        (["127.9.9.9"] * 9, []),
        (["::1"] * 9, []),
        (["::ffff:127.0.0.1"] * 9, []),
        ([None] * 9, []),
        # named as proxies
        (["10.1.2.3"] * 9, []),
        (["198.51.100.7"] * 9, []),
        (["::ffff:10.1.2.3"] * 9, []),
        (["2001:db8:1::5"] * 9, []),
        (["198.51.100.8"] * 4, [0]),
        # one host has a network of IPv6 for itself
        ([f"2001:db8:2:3::{number}" for number in range(1, 6)], [0, 1]),
        ([f"2001:db8:2:{number}::1" for number in range(1, 6)], []),
        (["fe80::1%eth0"] * 4, [0]),
        (["192.0.2.1", "::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.1"], [0]),
    ],
)
def test_the_oldest_of_an_address_goes(addresses, given_up):
    room = Unfinished(3, networks_of(["10.0.0.0/8", "198.51.100.7", "2001:db8:1::/48"]))
    beginners = [Beginner(address) for address in addresses]
    assert begun(room, beginners) == given_up
    assert len(room) == len(addresses) - len(given_up)
    for beginner in beginners:
        room.end(beginner)
    assert room.statistics() == {"unfinished": 0, "addresses": 0, "idle": 0, "displaced": len(given_up)}


def given_up(beginners: list[Beginner]) -> list[int]:
    return [number for number, beginner in enumerate(beginners) if beginner.is_given_up]


def test_the_last_descriptors_are_for_whoever_comes_next():
    # of 100 that may be open, 97 are others than connections
    room = Unfinished(descriptors=Descriptors(100, lambda: 98))
    beginners = [Beginner("127.0.0.1") for _ in range(5)]
    for beginner in beginners:
        room.arrive(beginner)
    assert given_up(beginners) == [0, 1]
    assert len(room) == 3
    for beginner in beginners:
        room.leave(beginner)
    room.arrive(Beginner("127.0.0.1"))
    assert room.statistics() == {"unfinished": 1, "addresses": 0, "idle": 0, "displaced": 2}


def test_who_is_idle_goes_last():
    room = Unfinished(descriptors=Descriptors(5, lambda: 1))
    busy, _, *idle = connections = [Beginner("127.0.0.1") for _ in range(5)]
    for connection in connections:
        room.arrive(connection)
    room.end(busy)
    for connection in idle:
        room.end(connection)
        room.rest(connection)
    # it asks again, and is answered
    room.begin(idle[0])
    room.end(idle[0])
    room.rest(idle[0])
    displaced = []
    for _ in range(4):
        newest = Beginner("127.0.0.1")
        room.arrive(newest)
        room.end(newest)
        displaced.append([*given_up(connections)])
    assert displaced == [[1], [1, 3], [1, 3, 4], [1, 2, 3, 4]]
    assert not busy.is_given_up


@pytest.mark.parametrize("is_idle", [True, False])
def test_who_has_something_unread_goes_after_the_others(is_idle):
    """It may be a request, or the rest of one, that came in the same turn."""
    room = Unfinished(descriptors=Descriptors(3, lambda: 1))
    beginners = [Beginner(has_unread=True), Beginner(), Beginner()]
    for beginner in beginners:
        room.arrive(beginner)
        if is_idle:
            room.end(beginner)
            room.rest(beginner)
    room.arrive(Beginner())
    assert given_up(beginners) == [1]


def test_where_all_have_something_unread_some_of_the_spare_descriptors_serve():
    """Until they are read; then the oldest go, two for each that comes."""
    come: list[Beginner] = []
    room = Unfinished(descriptors=Descriptors(3, lambda: 1 + len(come)))
    beginners = [Beginner(has_unread=True) for _ in range(30)]
    for beginner in beginners:
        come.append(beginner)
        room.arrive(beginner)
    gone = given_up(beginners)
    assert gone == list(range(len(gone)))
    assert 0 < len(gone) < 10
    for beginner in beginners:
        beginner.has_unread = lambda: False
    room.arrive(Beginner())
    assert given_up(beginners) == list(range(len(gone) + 2))


def test_who_is_alone_stays():
    room = Unfinished(descriptors=Descriptors(0, lambda: 1))
    alone = Beginner()
    room.arrive(alone)
    assert not alone.is_given_up


def test_who_answers_still_is_no_room_for_others():
    room = Unfinished(descriptors=Descriptors(2, lambda: 1))
    beginners = [Beginner(is_answering=True), Beginner(), Beginner()]
    for beginner in beginners:
        room.arrive(beginner)
    assert given_up(beginners) == [0, 1]
    assert room.statistics()["displaced"] == 1


def test_descriptors_are_counted_the_less_often_the_more_there_are():
    for num_open in (100, 10_000):
        counts = []
        descriptors = Descriptors(20_000, lambda num=num_open, counts=counts: counts.append(num) or num)
        for number in range(1, 1001):
            descriptors.num_for(number)
        # what all of the counting looked at
        assert sum(counts) <= 1000 * 16 + num_open
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < Descriptors().num_for(0) < soft


@pytest.mark.parametrize(("number", "goes"), [(errno.EMFILE, [0]), (errno.ENFILE, [0]), (errno.ENOENT, [])])
def test_where_descriptors_cannot_be_counted(monkeypatch, number, goes):
    def listdir(path):
        raise OSError(number, path)

    monkeypatch.setattr(os, "listdir", listdir)
    room = Unfinished(descriptors=Descriptors())
    beginners = [Beginner() for _ in range(2)]
    # the first one is alone, and stays for that
    for beginner in beginners:
        room.arrive(beginner)
    assert given_up(beginners) == goes


@pytest.mark.parametrize("address", ["proxy.test", "10.0.0.0/99", "1.2.3"])
def test_a_proxy_is_an_address(address):
    with pytest.raises(OptionError, match="must be an IP address or a network, such as"):
        networks_of([address])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        # answered, and idle
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/completions/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    ],
)
def test_those_who_hold_all_descriptors_keep_nobody_out(run, tmp_path, monkeypatch, sent):
    from quire.testing.fake_engine import fake_engine

    num_silent, num_free = 60, 20

    async def be_silent(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            while await reader.read(2**16):
                pass
        finally:
            writer.close()

    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            # each connection takes one at the server, and one at the client, which is the same process
            most = len(os.listdir("/dev/fd")) + 2 * num_free
            monkeypatch.setattr("quire.interfaces.server.http_server.Descriptors", lambda: Descriptors(most))
            options = ServerOptions(storage_url="sqlite:///:memory:", first_byte_seconds=1000.0)
            server = http_server(options, listener, None)
            server.attach(engine)
            server.start()
            port = listener.getsockname()[1]
            silent = []
            for _ in range(num_silent):
                silent.append(asyncio.create_task(be_silent(port)))
                for _ in range(20):
                    await asyncio.sleep(0)
            [(_, uvicorn)] = server._ports
            num_held = len(uvicorn.server_state.connections)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            for client in silent:
                client.cancel()
            await asyncio.wait(silent)
            await server.close()
        engine.shutdown()
        return num_held, answer

    num_held, answer = run(main())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert 0 < num_held < num_silent

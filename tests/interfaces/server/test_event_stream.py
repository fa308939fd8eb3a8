"""EventStream alone: silence, clients that do not read, the order on the wire."""

import asyncio
import gc
import socket
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest
from tests.support.pumped import pumped

from quire.interfaces.server import event_stream
from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.event_stream import OPENAI, OUTLET, EventStream
from quire.interfaces.server.wire.errors import unavailable


class Wire:
    """What a server under the application does: hands over messages, and keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.changed = asyncio.Event()
        self.gone = asyncio.Event()
        self.is_stuck = False

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        self.sent.append(message)
        self.changed.set()
        if self.is_stuck and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def until(self, condition) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Passing:
    """An answer whose pieces are events already."""

    dialect = OPENAI

    def __init__(self, opened) -> None:
        self.opened = opened

    def generating(self):
        return self.opened

    def encode(self, event):
        return event

    async def end(self):
        return b""


class Source:
    """Events that stop in the middle until they are told to go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.is_closed = False

    async def events(self):
        try:
            yield b"data: 1\n\n"
            await self.go_on.wait()
            yield b"data: 2\n\n"
        finally:
            self.is_closed = True


@pytest.fixture
def scope() -> dict:
    return {"type": "http"}


def test_a_silent_stream_is_kept_alive(run, scope, monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.001)

    async def main():
        wire, source = Wire(), Source()
        stream = EventStream(InFlight(), Passing(pumped(source.events())))
        task = asyncio.create_task(stream(scope, wire.receive, wire.send))
        await wire.until(lambda: wire.body.count(b": keep-alive\n\n") >= 2)
        source.go_on.set()
        await task
        assert wire.body.startswith(b"data: 1\n\n: keep-alive\n\n: keep-alive\n\n")
        assert wire.body.endswith(b"data: 2\n\ndata: [DONE]\n\n")
        assert [message["type"] for message in wire.sent].count("http.response.start") == 1
        assert [message.get("more_body") for message in wire.sent[1:]] == [True] * (len(wire.sent) - 2) + [False]

    run(main())


def test_a_client_that_does_not_read_is_given_up(run, scope, monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.001)
    monkeypatch.setattr(event_stream, "WRITE_DEADLINE_SECONDS", 0.002)

    async def main():
        wire, source, in_flight = Wire(), Source(), InFlight()
        wire.is_stuck = True
        await EventStream(in_flight, Passing(pumped(source.events())))(scope, wire.receive, wire.send)
        assert source.is_closed
        assert len(in_flight) == 0
        assert wire.body == b"data: 1\n\n"
        assert scope["client_gone"]

    run(main())


def test_a_client_that_leaves(run, scope):
    async def main():
        wire, source, in_flight = Wire(), Source(), InFlight()
        task = asyncio.create_task(
            EventStream(in_flight, Passing(pumped(source.events())))(scope, wire.receive, wire.send)
        )
        await wire.until(lambda: wire.body)
        assert len(in_flight) == 1
        wire.gone.set()
        await task
        assert source.is_closed
        assert len(in_flight) == 0

    run(main())


def test_an_interrupted_stream_says_why(run, scope):
    async def main():
        wire, source, in_flight = Wire(), Source(), InFlight()
        task = asyncio.create_task(
            EventStream(in_flight, Passing(pumped(source.events())))(scope, wire.receive, wire.send)
        )
        await wire.until(lambda: wire.body)
        in_flight.interrupt_all(unavailable("Good bye."))
        # the first cause counts
        in_flight.interrupt_all(unavailable("Something else."))
        await task
        assert source.is_closed
        assert b'data: {"error":{"message":"Good bye."' in wire.body
        assert wire.body.endswith(b"\n\ndata: [DONE]\n\n")

    run(main())


def test_a_stream_that_is_cancelled_from_elsewhere_is_cancelled(run, scope):
    async def main():
        wire, source, in_flight = Wire(), Source(), InFlight()
        task = asyncio.create_task(
            EventStream(in_flight, Passing(pumped(source.events())))(scope, wire.receive, wire.send)
        )
        await wire.until(lambda: wire.body)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.is_closed
        assert len(in_flight) == 0

    run(main())


def test_an_interrupt_at_the_very_end_still_closes_the_stream(run, scope):
    async def main():
        wire, in_flight = Wire(), InFlight()

        async def events():
            yield b"data: 1\n\n"
            # nothing waits between here and the end of the events
            in_flight.interrupt_all(unavailable("Good bye."))

        await EventStream(in_flight, Passing(pumped(events())))(scope, wire.receive, wire.send)
        assert b'"message":"Good bye."' in wire.body
        assert wire.body.endswith(b"\n\ndata: [DONE]\n\n")

    run(main())


class StuckAtTheEnd(Wire):
    """Whose reader takes everything but the last bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = asyncio.Event()

    async def send(self, message) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.has_come.set()
            await asyncio.Event().wait()
        await super().send(message)


def test_a_stream_is_in_flight_until_its_end_was_taken(run, scope):
    async def main():
        wire, in_flight = StuckAtTheEnd(), InFlight()

        async def events():
            yield b"data: 1\n\n"

        task = asyncio.create_task(EventStream(in_flight, Passing(pumped(events())))(scope, wire.receive, wire.send))
        await asyncio.sleep(0)
        empty = asyncio.create_task(in_flight.wait_empty())
        await wire.has_come.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        assert (len(in_flight), empty.done()) == (1, False)
        in_flight.interrupt_all(unavailable("Good bye."))
        await asyncio.gather(task, empty)
        assert scope["client_gone"]

    run(main())


class SlowWire(Wire):
    """Sends the keep-alive only when told to, and counts how many send at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.num_sending = 0
        self.most_sending = 0

    async def send(self, message) -> None:
        self.num_sending += 1
        self.most_sending = max(self.most_sending, self.num_sending)
        await super().send(message)
        if b"keep-alive" in message.get("body", b""):
            await self.go_on.wait()
        self.num_sending -= 1


def test_events_wait_for_a_keep_alive_on_its_way(run, scope, monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.001)

    async def main():
        wire, source = SlowWire(), Source()
        task = asyncio.create_task(
            EventStream(InFlight(), Passing(pumped(source.events())))(scope, wire.receive, wire.send)
        )
        await wire.until(lambda: b"keep-alive" in wire.body)
        source.go_on.set()
        for _ in range(10):
            await asyncio.sleep(0)
        wire.go_on.set()
        await task
        assert wire.most_sending == 1
        assert wire.body.endswith(b"data: 2\n\ndata: [DONE]\n\n")

    run(main())


def test_a_keep_alive_that_nobody_takes_gives_the_client_up(run, scope, monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.001)
    monkeypatch.setattr(event_stream, "WRITE_DEADLINE_SECONDS", 0.002)

    async def main():
        wire, source = SlowWire(), Source()
        await EventStream(InFlight(), Passing(pumped(source.events())))(scope, wire.receive, wire.send)
        assert source.is_closed
        assert scope["client_gone"]

    run(main())


class Ready:
    """A stream of which all has come."""

    def __init__(self, pieces) -> None:
        self.pieces = pieces

    def tell(self, reader) -> None:
        pass

    @property
    def has_news(self) -> bool:
        return bool(self.pieces)

    @property
    def is_done(self) -> bool:
        return not self.pieces

    def take(self):
        pieces, self.pieces = self.pieces, []
        return pieces


def test_of_what_is_ready_so_much_is_written_in_a_turn(run, scope):
    """Others have theirs between."""

    async def main():
        bytes_by_turn = Counter()
        turn = 0

        def write(data: bytes) -> bool:
            bytes_by_turn[turn] += len(data)
            return True

        scope["extensions"] = {OUTLET: {"write": write, "give_up": lambda: None}}
        wire = Wire()
        stream = EventStream(InFlight(), Passing(nullcontext(Ready([b"x" * 20_000] * 20))))
        task = asyncio.create_task(stream(scope, wire.receive, wire.send))
        while not task.done():
            await asyncio.sleep(0)
            turn += 1
        await task
        assert bytes_by_turn.total() == 400_000
        assert max(bytes_by_turn.values()) <= event_stream._BYTES_OF_TURN + 20_000

    run(main())


@pytest.mark.parametrize("ending", ["whole", "gone", "interrupted"])
def test_a_stream_that_has_ended_leaves_nothing_for_the_garbage_collector(run, scope, ending):
    """It would keep its prompt until then."""

    async def main():
        wire, source, in_flight = Wire(), Source(), InFlight()
        events = source.events()
        made = weakref.ref(events)
        task = asyncio.create_task(EventStream(in_flight, Passing(pumped(events)))(scope, wire.receive, wire.send))
        del events
        await wire.until(lambda: wire.body)
        if ending == "whole":
            source.go_on.set()
        elif ending == "gone":
            wire.gone.set()
        elif ending == "interrupted":
            in_flight.interrupt_all(unavailable("Good bye."))
        await task
        del task
        assert made() is None

    gc.collect()
    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------- without a task


class Pushed:
    """A stream whose events a test puts in by hand."""

    def __init__(self) -> None:
        self.reader: Callable[[], None] = lambda: None
        self.waiting: list[bytes] = []
        self.is_done = False
        self.error: Exception | None = None

    def tell(self, reader: Callable[[], None]) -> None:
        self.reader = reader

    @property
    def has_news(self) -> bool:
        return bool(self.waiting) or self.error is not None

    def push(self, *events: bytes, is_last: bool = False) -> None:
        self.waiting += events
        self.is_done = is_last
        self.reader()

    def take(self) -> list[bytes]:
        if self.error is not None and not self.waiting:
            raise self.error
        taken, self.waiting = self.waiting, []
        return taken

    async def aclose(self) -> None: ...

    @asynccontextmanager
    async def opened(self):
        yield self


async def begun(wire, source, scope, **in_scope):
    """A stream that waits for events."""
    scope.update(in_scope)
    task = asyncio.create_task(EventStream(InFlight(), Passing(source.opened()))(scope, wire.receive, wire.send))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def test_an_event_is_on_the_wire_when_its_push_returns(run, scope):
    async def main():
        wire, source = Wire(), Pushed()
        task = await begun(wire, source, scope)
        for number in range(3):
            source.push(b"%d" % number)
            assert wire.body == b"012"[: number + 1]
        source.push(b"3", is_last=True)
        await task
        assert wire.body == b"0123data: [DONE]\n\n"

    run(main())


class StalledWire(Wire):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def send(self, message) -> None:
        await self.go_on.wait()
        await super().send(message)


def test_what_comes_while_the_client_is_slow_goes_together(run, scope):
    async def main():
        wire, source = StalledWire(), Pushed()
        task = await begun(wire, source, scope)
        source.push(b"0")
        source.push(b"1")
        source.push(b"2", is_last=True)
        assert source.waiting == [b"1", b"2"]
        wire.go_on.set()
        await task
        bodies = [message["body"] for message in wire.sent if message["type"] == "http.response.body"]
        assert bodies == [b"0", b"12", b"data: [DONE]\n\n"]

    run(main())


def test_an_error_while_the_client_is_slow_is_told_behind_what_came_before_it(run, scope):
    async def main():
        wire, source = StalledWire(), Pushed()
        task = await begun(wire, source, scope)
        source.push(b"0")
        source.push(b"1")
        source.error = unavailable("Good bye.")
        source.reader()
        wire.go_on.set()
        await task
        assert wire.body.startswith(b"01")
        assert b"Good bye." in wire.body
        assert wire.body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_an_error_among_events_is_told(run, scope):
    async def main():
        wire, source = Wire(), Pushed()
        task = await begun(wire, source, scope)
        source.push(b"0")
        source.error = unavailable("Good bye.")
        source.reader()
        await task
        assert b"Good bye." in wire.body
        assert wire.body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_a_wire_that_breaks_ends_the_request(run, scope):
    async def main():
        wire, source = StalledWire(), Pushed()

        async def broken(message):
            await wire.go_on.wait()
            raise OSError("broken")

        wire.send = broken
        task = await begun(wire, source, scope)
        source.push(b"0")
        wire.go_on.set()
        with pytest.raises(OSError, match="broken"):
            await task

    run(main())


def test_a_body_that_has_begun_goes_the_short_way(run, scope):
    async def main():
        wire, source, short = Wire(), Pushed(), []

        def write(data: bytes) -> bool:
            if not wire.body or len(short) == 2:
                return False
            short.append(data)
            return True

        task = await begun(wire, source, scope, extensions={event_stream.OUTLET: {"write": write}})
        for event in (b"0", b"1", b"2", b"3"):
            source.push(event)
        source.push(is_last=True)
        await task
        assert short == [b"1", b"2"]
        assert wire.body == b"03data: [DONE]\n\n"

    run(main())


# more than the system takes for a client that does not read
SIZE = 16 * 2**20


@pytest.mark.parametrize("has_more", [True, False])
def test_a_client_that_stops_reading_is_given_up_with_what_waits_for_it(
    run, on_a_socket, monkeypatch, caplog, has_more
):
    """In the middle, and when nothing but the end is missing."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(event_stream, "WRITE_DEADLINE_SECONDS", 0.05)

    async def events():
        yield bytes(SIZE)
        while has_more:
            yield b"more"
            await asyncio.sleep(0)

    async def main():
        over = asyncio.Event()

        async def app(scope, receive, send):
            await EventStream(InFlight(), Passing(pumped(events())))(scope, receive, send)
            assert scope["client_gone"]
            over.set()

        async with on_a_socket(SimpleNamespace(app=app)) as url:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                await over.wait()
                # no more comes than the system had taken
                assert await asyncio.to_thread(lambda: len(client.makefile("rb").read())) < SIZE

    run(main())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []

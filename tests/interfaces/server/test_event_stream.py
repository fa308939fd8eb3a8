"""EventStream alone: silence, clients that do not read, the order on the wire."""

import asyncio

import pytest

from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.wire import event_stream
from quire.interfaces.server.wire.errors import unavailable
from quire.interfaces.server.wire.event_stream import EventStream


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
        stream = EventStream(InFlight(), source.events())
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
        await EventStream(in_flight, source.events())(scope, wire.receive, wire.send)
        assert source.is_closed
        assert len(in_flight) == 0
        assert wire.body == b"data: 1\n\n"
        assert scope["client_gone"]

    run(main())


def test_a_client_that_leaves(run, scope):
    async def main():
        wire, source, in_flight = Wire(), Source(), InFlight()
        task = asyncio.create_task(EventStream(in_flight, source.events())(scope, wire.receive, wire.send))
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
        task = asyncio.create_task(EventStream(in_flight, source.events())(scope, wire.receive, wire.send))
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
        task = asyncio.create_task(EventStream(in_flight, source.events())(scope, wire.receive, wire.send))
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

        await EventStream(in_flight, events())(scope, wire.receive, wire.send)
        assert b'"message":"Good bye."' in wire.body
        assert wire.body.endswith(b"\n\ndata: [DONE]\n\n")

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
        task = asyncio.create_task(EventStream(InFlight(), source.events())(scope, wire.receive, wire.send))
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
        await EventStream(InFlight(), source.events())(scope, wire.receive, wire.send)
        assert source.is_closed
        assert scope["client_gone"]

    run(main())

"""Server-sent events: one answer that is sent while it is made.

Owns the order on the wire: real status codes until the first byte, an error event after it, and at the end of both what
the dialect ends with (`data: [DONE]`). It never ends a response without one of them, unless the client is gone. Events
arrive as bytes that are complete; several that are ready together are sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from fastapi import Response

from quire.engine_client import Stream, each_of
from quire.interfaces.server.access.in_flight import InFlight, Receive, Ticket
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError, api_error_of

# Written in a turn of the event loop, and one event more: what is ready beyond it has the next turns.
_BYTES_OF_TURN = 64 * 1024
KEEP_ALIVE_SECONDS = 15.0
# A client that takes nothing for so long is taken for gone.
WRITE_DEADLINE_SECONDS = 60.0

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
# What a server may offer in `scope["extensions"]`: its "write" sends a piece of a body past everything that stands
# between it and the endpoint, once the body has begun, or answers False; its "give_up" ends the connection with all
# that still waits in it. transport/http_protocol.py sets it, and nearly every token goes that way.
OUTLET = "quire.outlet"
Outlet = Callable[[bytes], bool]
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def _no_outlet(data: bytes) -> bool:
    return False


_NO_OUTLET = {"write": _no_outlet, "give_up": lambda: None}


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


@dataclass(frozen=True)
class StreamDialect:
    """What streams of one API say beside their events."""

    # after a long silence
    keep_alive: bytes = b": keep-alive\n\n"
    # an error that comes after the first byte
    error_event: Callable[[ApiError], bytes] = _error_event
    closing: bytes = b"data: [DONE]\n\n"
    media_type: str = "text/event-stream"


OPENAI = StreamDialect()


class Answer(Protocol):
    """One answer in the words of one API: what comes of the engine as bytes for a stream, or folded to one object. The
    same pieces go into both, and each piece into one of them."""

    # a list of the object that may be long
    long_field: str

    @property
    def dialect(self) -> StreamDialect: ...

    def generating(self) -> AbstractAsyncContextManager[Stream[Any]]:
        """Starts it. It runs for as long as this is open."""

    def encode(self, piece: Any) -> bytes:
        """Events, which may be none."""

    async def end(self) -> bytes:
        """The events behind all others. It may take its time."""

    def fold(self, piece: Any) -> None:
        """The same, for a whole answer."""

    async def whole(self) -> Any:
        """What all pieces are together."""


async def folded(answer: Answer) -> Any:
    """The whole answer."""
    async with answer.generating() as generation:
        await each_of(generation, answer.fold)
    return await answer.whole()


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """An event that says its type twice, as dialects with events of several types want it."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class _Rest:
    """What is left of an awaitable that was run until it first waited."""

    def __init__(self, steps: Generator[Any, Any, None], first: Any) -> None:
        self._steps = steps
        self._first = first

    async def run(self) -> None:
        await self

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._first
        except BaseException:
            self._steps.close()
            raise
        yield from self._steps


class _Writer:
    """The response on its way: sends the head before the first bytes, and knows when it sent last.

    What can be sent at once is sent by whoever brings it, without a task. When the client is slow, a task waits for it,
    and what comes meanwhile is left in the stream, where it is merged.
    """

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]], outlet: Outlet) -> None:
        self._send = send
        self._outlet = outlet
        self._head = {"type": "http.response.start", "status": status, "headers": headers}
        self._clock = asyncio.get_running_loop().time
        self._on_its_way: asyncio.Task[None] | None = None
        self._stream: Stream[Any] | None = None
        self._encode: Callable[[Any], bytes] = bytes
        # taken of the stream, and not written yet
        self._left: list[Any] = []
        self._is_due = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_started = False
        self.last_progress = self._clock()

    @property
    def is_sending(self) -> bool:
        return self._on_its_way is not None

    @property
    def seconds_since_progress(self) -> float:
        return self._clock() - self.last_progress

    async def carry(self, stream: Stream[Any], encode: Callable[[Any], bytes]) -> None:
        """Sends all of it as it comes."""
        self._stream = stream
        self._encode = encode
        stream.tell(self._take)
        try:
            self._take()
            await self._over
        finally:
            self._stream = None
            if self._on_its_way is not None:
                self._on_its_way.cancel()
                await asyncio.gather(self._on_its_way, return_exceptions=True)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Behind what is on its way."""
        while self._on_its_way is not None:
            await asyncio.wait([self._on_its_way])
        self._begin(data, is_last=is_last)
        if self._on_its_way is not None:
            await self._on_its_way

    def _take(self) -> None:
        """Called when something has come, and when the client has taken what was sent."""
        if self._stream is None or self._on_its_way is not None or self._is_due or self._over.done():
            return
        stream = self._stream
        has_more = True
        try:
            while has_more and self._on_its_way is None:
                data = self._encoded(self._left or stream.take())
                if data:
                    self.last_progress = self._clock()
                    if not self._outlet(data):
                        self._begin(data)
                # an end that came while the client was slow is told of by nobody a second time
                has_more = not self._left and stream.has_news and not stream.is_done
            if self._on_its_way is not None:
                return
            if self._left:
                self._is_due = True
                asyncio.get_running_loop().call_soon(self._take_what_is_left)
            elif stream.is_done:
                self._over.set_result(None)
        except Exception as error:
            self._over.set_exception(error)

    def _encoded(self, pieces: Iterable[Any]) -> bytes:
        waiting = iter(pieces)
        encode = self._encode
        events: list[bytes] = []
        num_bytes = 0
        for piece in waiting:
            event = encode(piece)
            events.append(event)
            num_bytes += len(event)
            if num_bytes > _BYTES_OF_TURN:
                break
        self._left = list(waiting)
        return b"".join(events)

    def _take_what_is_left(self) -> None:
        self._is_due = False
        self._take()

    def _begin(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends; what cannot be sent at once is on its way afterwards."""
        self.last_progress = self._clock()
        body = {"type": "http.response.body", "body": data, "more_body": not is_last}
        steps = (self._send(body) if self.has_started else self._send_first(body)).__await__()
        try:
            first = next(steps)
        except StopIteration:
            return
        self._on_its_way = asyncio.create_task(_Rest(steps, first).run())
        self._on_its_way.add_done_callback(self._sent)

    async def _send_first(self, body: MutableMapping[str, Any]) -> None:
        await self._send(self._head)
        self.has_started = True
        await self._send(body)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._on_its_way = None
        if not task.cancelled() and task.exception() is not None and not self._over.done():
            self._over.set_exception(cast(BaseException, task.exception()))
        self._take()


class EventStream(Response):
    """A response whose body is an answer while it is made. It is started when the response begins, and closed in every
    case, which aborts the request."""

    def __init__(self, in_flight: InFlight, answer: Answer) -> None:
        super().__init__(headers=_HEADERS, media_type=answer.dialect.media_type)
        # the length is not known
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._in_flight = in_flight
        self._answer = answer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.status_code, self.raw_headers, _outlet_in(scope)["write"])
        answer = self._answer
        closing = answer.dialect.closing
        try:
            with self._in_flight.enter() as ticket:
                watcher = asyncio.ensure_future(self._watch(receive, ticket, writer))
                try:
                    async with answer.generating() as generation:
                        await writer.carry(generation, answer.encode)
                    ending = await answer.end() + closing
                finally:
                    watcher.cancel()
                    # an interrupt that is on its way lands here, and not in the last write
                    await asyncio.sleep(0)
        except ClientGoneError:
            scope["client_gone"] = True
            return await give_up(scope)
        except Exception as error:
            if not writer.has_started:
                raise
            ending = answer.dialect.error_event(api_error_of(error)) + closing
        try:
            # the engine is done, and a server that ends still waits
            with self._in_flight.enter():
                async with asyncio.timeout(WRITE_DEADLINE_SECONDS):
                    await writer.write(ending, is_last=True)
        except (TimeoutError, ApiError, ClientGoneError):
            scope["client_gone"] = True
            await give_up(scope)

    async def _watch(self, receive: Receive, ticket: Ticket, writer: _Writer) -> None:
        """Notices a client that has gone or does not read, and keeps a silent connection alive."""
        received = asyncio.ensure_future(receive())
        try:
            while True:
                done, _ = await asyncio.wait({received}, timeout=KEEP_ALIVE_SECONDS)
                if done and received.result()["type"] == "http.disconnect":
                    return ticket.interrupt(ClientGoneError())
                if done:
                    received = asyncio.ensure_future(receive())
                elif writer.is_sending and writer.seconds_since_progress >= WRITE_DEADLINE_SECONDS:
                    return ticket.interrupt(ClientGoneError("slow_client"))
                elif not writer.is_sending and writer.seconds_since_progress >= KEEP_ALIVE_SECONDS:
                    async with asyncio.timeout(WRITE_DEADLINE_SECONDS):
                        await writer.write(self._answer.dialect.keep_alive)
        except TimeoutError:
            ticket.interrupt(ClientGoneError("slow_client"))
        finally:
            received.cancel()


async def give_up(scope: Mapping[str, Any]) -> None:
    """Ends the connection in the middle of an answer. Closed in the ordinary way, it would keep what waits in it until
    somebody reads it."""
    _outlet_in(scope)["give_up"]()
    # the server hears of it, and does not miss the end of the answer
    await asyncio.sleep(0)


def _outlet_in(scope: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    outlet: Mapping[str, Callable[..., Any]] = scope.get("extensions", {}).get(OUTLET, _NO_OUTLET)
    return outlet

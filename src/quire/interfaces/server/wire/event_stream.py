"""Server-sent events: one answer that is sent while it is made.

Owns the order on the wire: real status codes until the first byte, an error event after it, and at the end of both what
the dialect ends with (`data: [DONE]`). It never ends a response without one of them, unless the client is gone. Events
arrive as bytes that are complete; several that are ready together are sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from quire.interfaces.server.access.in_flight import InFlight, Receive, Ticket
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError, api_error_of

KEEP_ALIVE_SECONDS = 15.0
# A client that takes nothing for so long is taken for gone.
WRITE_DEADLINE_SECONDS = 60.0

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


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


OPENAI = StreamDialect()


class _Writer:
    """The response on its way: sends the head before the first bytes, and knows when it sent last."""

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._head = {"type": "http.response.start", "status": status, "headers": headers}
        self._clock = asyncio.get_running_loop().time
        # the events and the watcher both write
        self._lock = asyncio.Lock()
        self.has_started = False
        self.last_progress = self._clock()

    @property
    def is_sending(self) -> bool:
        return self._lock.locked()

    @property
    def seconds_since_progress(self) -> float:
        return self._clock() - self.last_progress

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        async with self._lock:
            self.last_progress = self._clock()
            if not self.has_started:
                await self._send(self._head)
                self.has_started = True
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


class EventStream(Response):
    """A response whose body is `events`. The generator is closed in every case, which aborts the request."""

    def __init__(
        self, in_flight: InFlight, events: AsyncGenerator[bytes, None], dialect: StreamDialect = OPENAI
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        # the length is not known
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._in_flight = in_flight
        self._events = events
        self._dialect = dialect

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.status_code, self.raw_headers)
        try:
            with self._in_flight.enter() as ticket:
                watcher = asyncio.ensure_future(self._watch(receive, ticket, writer))
                try:
                    async with aclosing(self._events) as events:
                        async for data in events:
                            await writer.write(data)
                finally:
                    watcher.cancel()
                    # an interrupt that is on its way lands here, and not in the writes below
                    await asyncio.sleep(0)
        except ClientGoneError:
            scope["client_gone"] = True
            return
        except Exception as error:
            if not writer.has_started:
                raise
            await writer.write(self._dialect.error_event(api_error_of(error)))
        await writer.write(self._dialect.closing, is_last=True)

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
                        await writer.write(self._dialect.keep_alive)
        except TimeoutError:
            ticket.interrupt(ClientGoneError("slow_client"))
        finally:
            received.cancel()

"""Connections that do not come to the point: who sends no whole request head in time is let go.

uvicorn closes a connection that is idle between two requests; it waits for ever for the first one, for a head that
comes one byte a minute, and for a client that does not read (slow_readers.py). A body that stands still is noticed
where it is read (request_body.py).
"""

from __future__ import annotations

import asyncio

from quire.interfaces.server.transport.http_protocol import HttpProtocol
from quire.interfaces.server.transport.slow_readers import SlowReaders, close_soon
from quire.interfaces.server.transport.unfinished import Unfinished, num_unread
from quire.interfaces.server.wire.errors import ApiError

# Of an answer, on its way to the system. Small: events wait there one by one, and uvloop spends more than twice their
# bytes on that; what is left in the stream instead is merged.
_MOST_UNSENT_BYTES = 4 * 1024


class Connection(HttpProtocol):
    """It is unfinished from the first byte that is missing to the end of the head."""

    # given by `connections_of`
    head_seconds: float
    unfinished: Unfinished
    slow_readers: SlowReaders

    _has_taken = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # a client that does not read costs no more than this, and the text that the engine goes on to make
        transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES)
        self.unfinished.arrive(self)
        self.slow_readers.arrive(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.unfinished.leave(self)
        self.slow_readers.leave(self)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._has_taken = True
        super().resume_writing()

    def has_taken(self) -> bool:
        # an event stream has a clock of its own, which knows the request behind it
        has_taken, self._has_taken = self._has_taken or self._is_streaming, False
        return has_taken

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.unfinished.begin(self)

    def on_headers_complete(self) -> None:
        self.unfinished.end(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.unfinished.rest(self)

    def give_up(self) -> bool:
        # while an answer is on its way the client may be slow with its next request: that answer closes when it is done
        if self.cycle is None or self.cycle.response_complete:
            close_soon(self.loop, self.transport)
            return True
        self.cycle.keep_alive = False
        return False

    def has_unread(self) -> bool:
        return num_unread(self.transport) > 0

    def _refuse(self, error: ApiError) -> None:
        super()._refuse(error)
        # it is listened to for a moment, unless its place is needed
        if not self.transport.is_closing():
            self.unfinished.begin(self)

    def _hand_over(self, rest: bytes) -> None:
        self.slow_readers.leave(self)
        super()._hand_over(rest)

    @property
    def _is_streaming(self) -> bool:
        answered = self._answered
        return answered is not None and bool(answered.chunked_encoding) and not answered.response_complete


def connections_of(
    head_seconds: float, unfinished: Unfinished, slow_readers: SlowReaders, base: type[Connection] = Connection
) -> type[Connection]:
    """The protocol for a server whose clients have so long for a request's head, and are bounded by these two."""
    members = {"head_seconds": head_seconds, "unfinished": unfinished, "slow_readers": slow_readers}
    return type(base.__name__, (base,), members)

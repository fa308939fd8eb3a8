"""Connections that do not come to the point: who sends no whole request head in time is let go, and who takes
nothing of an answer.

uvicorn closes a connection that is idle between two requests; it waits for ever for the first one, for a head that
comes one byte a minute, and for a client that does not read. A body that stands still is noticed where it is read
(request_body.py).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from quire.interfaces.server.transport.http_protocol import OpenAIProtocol
from quire.interfaces.server.transport.unfinished import Unfinished, num_unread
from quire.interfaces.server.wire.errors import ApiError
from quire.interfaces.server.wire.event_stream import WRITE_DEADLINE_SECONDS

logger = logging.getLogger("quire.server.access")

# Of an answer, on its way to the system. Small: events wait there one by one, and uvloop spends more than twice their
# bytes on that; what is left in the stream instead is merged.
_MOST_UNSENT_BYTES = 4 * 1024
# In the time that a client has to take something, it is looked so often whether it did.
_LOOKS = 4


class Connection(OpenAIProtocol):
    """It is unfinished from the first byte that is missing to the end of the head. A clock runs while an answer waits
    for its client to read. An event stream has its own for that, which knows the request behind it."""

    # overridden by `connections_of`
    head_seconds = 10.0
    unfinished = Unfinished()
    write_seconds = WRITE_DEADLINE_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._write_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # a client that does not read costs no more than this, and the text that the engine goes on to make
        transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES)
        self.unfinished.arrive(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.unfinished.leave(self)
        self._stop_write_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(_LOOKS)

    def resume_writing(self) -> None:
        self._stop_write_clock()
        super().resume_writing()

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
            self.transport.close()
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
        # what is written from now on is no answer any more
        self._stop_write_clock()
        super()._hand_over(rest)

    def _look_again(self, num_looks: int) -> None:
        """So often before the client is given up, unless it takes something."""
        unsent = self.transport.get_write_buffer_size()
        self._write_clock = self.loop.call_later(self.write_seconds / _LOOKS, self._look, num_looks, unsent)

    def _look(self, num_looks: int, unsent_before: int) -> None:
        has_taken = self.transport.get_write_buffer_size() < unsent_before
        if has_taken or self._is_streaming:
            self._look_again(_LOOKS)
        elif num_looks > 1:
            self._look_again(num_looks - 1)
        else:
            self._write_clock = None
            address = "{}:{}".format(*self.client) if self.client else "somebody"
            logger.info("%s takes nothing of its answer for %g s and is given up", address, self.write_seconds)
            # closed in the ordinary way, it would wait until somebody reads what is left
            self.transport.abort()

    @property
    def _is_streaming(self) -> bool:
        answered = self._answered
        return answered is not None and bool(answered.chunked_encoding) and not answered.response_complete

    def _stop_write_clock(self) -> None:
        if self._write_clock is not None:
            self._write_clock.cancel()
            self._write_clock = None


def connections_of(head_seconds: float, unfinished: Unfinished | None = None) -> type[Connection]:
    """The protocol for a server whose clients have so long for a request's head, and are bounded by `unfinished`."""
    members = {"head_seconds": head_seconds, "unfinished": Unfinished() if unfinished is None else unfinished}
    return type("Connection", (Connection,), members)

"""Connections that do not come to the point: who sends no whole request head in time is let go.

uvicorn closes a connection that is idle between two requests; it waits for ever for the first one, and for a head that
comes one byte a minute. A body that stands still is noticed where it is read (request_body.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.interfaces.server.transport.http_protocol import OpenAIProtocol

# Of an answer, on its way to the system. Small: events wait there one by one, and uvloop spends more than twice their
# bytes on that; what is left in the stream instead is merged.
_MOST_UNSENT_BYTES = 4 * 1024


class Connection(OpenAIProtocol):
    """A clock runs from the first byte that is missing to the end of the head."""

    head_seconds = 10.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # a client that does not read costs no more than this, and the text that the engine goes on to make
        transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_clock()

    def on_headers_complete(self) -> None:
        self._stop_clock()
        super().on_headers_complete()

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self.head_seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _give_up(self) -> None:
        self._clock = None
        # while an answer is on its way the client may be slow with its next request: that answer closes when it is done
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False


def connections_of(head_seconds: float) -> type[asyncio.Protocol]:
    """The protocol for a server whose clients have so long for a request's head."""
    return type("Connection", (Connection,), {"head_seconds": head_seconds})

"""Clients that take nothing of what is written to them, which would keep it, and their connection, for ever.

Also what is left when a connection closes in the ordinary way waits until somebody reads it. So one clock looks at all
connections of a process from time to time: who has left the same bytes for long enough is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from quire.interfaces.server.event_stream import WRITE_DEADLINE_SECONDS

logger = logging.getLogger("quire.server.access")

# In the time that a client has to take something, it is looked so often whether it did.
_LOOKS = 4

# A connection whose place is needed has so long for what was written already.
_FLUSH_SECONDS = 1.0


class Reader(Protocol):
    """A connection whose client reads."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None

    def has_taken(self) -> bool:
        """Whether its client has taken something since this was asked last, as far as the connection knows."""


class SlowReaders:
    """Of one process."""

    def __init__(self, seconds: float = WRITE_DEADLINE_SECONDS) -> None:
        self._seconds = seconds
        # what was left of each at the last look, and how many looks ago that was more
        self._readers: dict[Reader, tuple[int, int]] = {}
        self._is_looking = False

    def arrive(self, reader: Reader) -> None:
        self._readers[reader] = 0, 0
        if not self._is_looking:
            self._is_looking = True
            self._look_later(reader.loop)

    def leave(self, reader: Reader) -> None:
        self._readers.pop(reader, None)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(self._seconds / _LOOKS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for reader, (unsent_before, num_looks) in list(self._readers.items()):
            unsent = reader.transport.get_write_buffer_size()
            has_taken = reader.has_taken() or unsent < unsent_before
            num_looks = 0 if has_taken or not unsent_before else num_looks + 1
            self._readers[reader] = unsent, num_looks
            if num_looks == _LOOKS:
                address = "{}:{}".format(*reader.client) if reader.client else "somebody"
                logger.info("%s takes nothing of its answer for %g s and is given up", address, self._seconds)
                reader.transport.abort()
        self._is_looking = bool(self._readers)
        if self._is_looking:
            self._look_later(loop)


def close_soon(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Others need its place."""
    transport.close()
    if transport.get_write_buffer_size():
        loop.call_later(_FLUSH_SECONDS, transport.abort)

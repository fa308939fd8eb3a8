"""Events of one answer, made when its reader can take them: several tokens in one if it is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from quire.engine_client import Stream
from quire.engine_client.mailbox import nobody
from quire.interfaces.assembly import OutputDelta


class AnswerEvents:
    """Encoded events, as a Stream, without the closing [DONE]. `encode` makes the events of a difference, which may be
    none, and `end` those that follow all of them; it may take its time."""

    def __init__(
        self,
        deltas: Stream[OutputDelta],
        encode: Callable[[OutputDelta], bytes],
        end: Callable[[], bytes | Coroutine[Any, Any, bytes]],
    ) -> None:
        self._deltas = deltas
        self._encode = encode
        self._end = end
        # what follows all events, while it is made
        self._ending: asyncio.Task[bytes] | None = None
        self._reader: Callable[[], None] = nobody
        self.is_done = False

    def tell(self, reader: Callable[[], None]) -> None:
        self._reader = reader
        self._deltas.tell(reader)

    @property
    def has_news(self) -> bool:
        if self._ending is not None:
            return self._ending.done() and not self.is_done
        return not self.is_done and (self._deltas.has_news or self._deltas.is_done)

    def take(self) -> list[bytes]:
        if self._ending is not None:
            return self._take_ending(self._ending)
        events = [self._encode(delta) for delta in self._deltas.take()]
        if self._deltas.is_done and not self.is_done:
            end = self._end()
            if isinstance(end, bytes):
                self.is_done = True
                events.append(end)
            else:
                self._ending = asyncio.ensure_future(end)
                self._ending.add_done_callback(lambda _: self._reader())
        return events

    def _take_ending(self, ending: asyncio.Task[bytes]) -> list[bytes]:
        if self.is_done or not ending.done():
            return []
        self.is_done = True
        return [ending.result()]

    async def aclose(self) -> None:
        self._reader = nobody
        if self._ending is not None:
            self._ending.cancel()
        await self._deltas.aclose()

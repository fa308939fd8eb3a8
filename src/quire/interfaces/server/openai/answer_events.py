"""Events of one answer, made when its reader can take them: several tokens in one if it is slow."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine_client import Stream
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.openai.running import PromptDelta


class AnswerEvents:
    """Encoded events, as a Stream, without the closing [DONE]. `encode` makes the events of a difference, which may be
    none, and `end` those that follow all of them."""

    def __init__(
        self,
        deltas: Stream[PromptDelta],
        encode: Callable[[int, OutputDelta], bytes],
        end: Callable[[], bytes],
    ) -> None:
        self._deltas = deltas
        self._encode = encode
        self._end = end
        self.is_done = False

    def tell(self, reader: Callable[[], None]) -> None:
        self._deltas.tell(reader)

    @property
    def has_news(self) -> bool:
        return not self.is_done and (self._deltas.has_news or self._deltas.is_done)

    def take(self) -> list[bytes]:
        events = []
        for number, delta in self._deltas.take():
            events.append(self._encode(number, delta))
        if self._deltas.is_done and not self.is_done:
            self.is_done = True
            events.append(self._end())
        return events

    async def aclose(self) -> None:
        await self._deltas.aclose()

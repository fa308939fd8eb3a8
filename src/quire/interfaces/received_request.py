"""A request whose prompt arrives, or has arrived, while it runs: what comes back from the core is held until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine_client import AsyncEngineClient, Stream, TokenDelta
from quire.errors import RequestError
from quire.interfaces.requests import PreparedRequest
from quire.messages import EngineRequest


class HeldRequest:
    """A request in the core, as a Stream. What comes from there before its prompt is whole is held, and comes with the
    next token of its sequence, not before."""

    def __init__(self, client: AsyncEngineClient, request: EngineRequest, reader: Callable[[], None]) -> None:
        self.request_id = request.request_id
        # one of its sequences has: the core takes no more
        self.has_ended = False
        self._tokens = client.open(request)
        self._tokens.tell(reader)
        # by index of the sequence
        self._held: dict[int, TokenDelta] = {}

    def look(self) -> None:
        """Holds what has come. Raises if the engine is dead."""
        for delta in self._tokens.take():
            self._held[delta.index] = self._with_held(delta)
            self.has_ended = self.has_ended or delta.is_finished

    def tell(self, reader: Callable[[], None]) -> None:
        self._tokens.tell(reader)

    @property
    def has_news(self) -> bool:
        return self._tokens.has_news or self.has_ended

    @property
    def is_done(self) -> bool:
        return self._tokens.is_done and not self.has_ended

    def take(self) -> list[TokenDelta]:
        ended = [index for index, delta in self._held.items() if delta.is_finished]
        self.has_ended = False
        return [*(self._held.pop(index) for index in ended), *map(self._with_held, self._tokens.take())]

    async def aclose(self) -> None:
        """Aborts what has not ended."""
        await self._tokens.aclose()

    def _with_held(self, delta: TokenDelta) -> TokenDelta:
        held = self._held.pop(delta.index, None)
        if held is None:
            return delta
        held.merge(delta)
        return held


class AbortedRequest:
    """One that its label ended while its prompt was arriving, as a Stream."""

    has_news = True

    def __init__(self, num_outputs: int) -> None:
        self._left = [TokenDelta(index, finish_reason="abort") for index in range(num_outputs)]

    def tell(self, reader: Callable[[], None]) -> None:
        """All that will come is there already."""

    @property
    def is_done(self) -> bool:
        return not self._left

    def take(self) -> list[TokenDelta]:
        taken = self._left
        self._left = []
        return taken

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReceivedRequest(PreparedRequest):
    """A request whose prompt has arrived. It runs: give it to `stream` or `generate` once, or close it."""

    running: list[HeldRequest | AbortedRequest] = field(default_factory=list)

    def start(self, client: AsyncEngineClient) -> Stream[TokenDelta]:
        if not self.running:
            raise RequestError(
                "This received request was read already, and can be read once. Call receive() for each run.",
                param="prompt",
            )
        return self.running.pop()

    async def aclose(self) -> None:
        """Aborts it if nobody reads it."""
        while self.running:
            await self.running.pop().aclose()

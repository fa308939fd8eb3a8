"""A request whose prompt arrives, or has arrived, while it runs: what comes back from the core is held until then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from quire.engine_client import AsyncEngineClient, TokenDelta
from quire.errors import RequestError
from quire.interfaces.requests import PreparedRequest
from quire.messages import EngineRequest


class HeldRequest:
    """A request in the core. What comes from there is held until its prompt is whole."""

    def __init__(self, client: AsyncEngineClient, request: EngineRequest, on_news: Callable[[], None]) -> None:
        self.request_id = request.request_id
        self.has_ended = False
        self._client = client
        self._deltas = client.generate(request)
        self._on_news = on_news
        # by index of the sequence
        self._held: dict[int, TokenDelta] = {}
        self._next: asyncio.Future[TokenDelta] | None = None
        self._wait_for_next()

    async def wait_sent(self) -> None:
        """Extensions may follow."""
        while not self._client.is_open(self.request_id) and self._next is not None and not self._next.done():
            await asyncio.sleep(0)

    def take(self) -> None:
        """Looks at what has come: an end means that the core takes no more. Raises if the engine is dead."""
        while self._next is not None and self._next.done():
            delta = self._next.result()
            self._next = None
            held = self._held.setdefault(delta.index, delta)
            if held is not delta:
                held.merge(delta)
            self.has_ended = delta.finish_reason is not None
            if not self.has_ended:
                self._wait_for_next()

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """Everything, from the beginning. What was held comes with the next token of its sequence, not before."""
        try:
            if self._next is not None:
                yield self._with_held(await self._next)
            else:
                for index in list(self._held):
                    yield self._held.pop(index)
            async for delta in self._deltas:
                yield self._with_held(delta)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Aborts what has not ended."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._deltas.aclose()  # type: ignore[attr-defined]

    def _with_held(self, delta: TokenDelta) -> TokenDelta:
        held = self._held.pop(delta.index, None)
        if held is None:
            return delta
        held.merge(delta)
        return held

    def _wait_for_next(self) -> None:
        self._next = asyncio.ensure_future(anext(self._deltas))
        self._next.add_done_callback(lambda _: self._on_news())


class AbortedRequest:
    """One that its label ended while its prompt was arriving."""

    def __init__(self, num_outputs: int) -> None:
        self._num_outputs = num_outputs

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        for index in range(self._num_outputs):
            yield TokenDelta(index, finish_reason="abort")

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReceivedRequest(PreparedRequest):
    """A request whose prompt has arrived. It runs: give it to `stream` or `generate` once, or close it."""

    running: list[HeldRequest | AbortedRequest] = field(default_factory=list)

    def start(self, client: AsyncEngineClient) -> AsyncIterator[TokenDelta]:
        if not self.running:
            raise RequestError(
                "This received request was read already, and can be read once. Call receive() for each run.",
                param="prompt",
            )
        return self.running.pop().deltas()

    async def aclose(self) -> None:
        """Aborts it if nobody reads it."""
        while self.running:
            await self.running.pop().aclose()

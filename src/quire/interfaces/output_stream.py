"""One request that runs: its outputs with their texts, for whoever is told when some have come, or waits for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from quire.engine_client import AsyncEngineClient, Stream, TokenDelta
from quire.errors import RequestError, RequestFailedError
from quire.interfaces.assembly import OutputDelta, RequestAssembly
from quire.interfaces.requests import PreparedRequest
from quire.renderer import Renderer


class OutputObserver(Protocol):
    """Hears of everything before the reader does."""

    def see(self, delta: OutputDelta) -> None:
        """What it raises ends the stream for the reader."""

    def fail(self) -> None:
        """The reader is about to get an exception."""


class Unobserved:
    """The one where nobody wants to know."""

    def see(self, delta: OutputDelta) -> None: ...
    def fail(self) -> None: ...


class OutputStream:
    """What a request brings, as a Stream of OutputDelta. `aclose` aborts what still runs."""

    def __init__(
        self,
        prepared: PreparedRequest,
        client: AsyncEngineClient,
        renderer: Renderer,
        label: AbstractContextManager[None],
        observer: OutputObserver,
        prompt_number: int,
    ) -> None:
        """Starts it. `label`: what it bears until it is closed."""
        self._assembly = RequestAssembly(prepared, renderer, prompt_number)
        self._observer = observer
        self._client = client
        self._request_id = prepared.request.request_id
        self._is_whole = prepared.is_whole
        self._has_started = False
        self._tokens: Stream[TokenDelta] = prepared.start(client)
        self._label: AbstractContextManager[None] | None = label
        label.__enter__()

    def tell(self, reader: Callable[[], None]) -> None:
        self._tokens.tell(reader)

    @property
    def has_news(self) -> bool:
        return self._tokens.has_news

    @property
    def is_done(self) -> bool:
        return self._tokens.is_done

    def take(self) -> list[OutputDelta]:
        """A sequence that fails raises RequestFailedError; a request that the engine has no room for even alone, or
        whose form cannot be followed, RequestError; the engine's death raises EngineDeadError."""
        news = []
        push = self._assembly.push
        see = self._observer.see
        try:
            for delta in self._tokens.take():
                new = push(delta)
                if new.finish_reason is not None:
                    self._see_end(new)
                elif new.num_cached_tokens is not None:
                    self._has_started = True
                see(new)
                news.append(new)
        except Exception:  # one that the core refuses included
            self._observer.fail()
            raise
        return news

    async def aclose(self) -> None:
        label = self._label
        self._label = None
        if label is not None:
            label.__exit__(None, None, None)
        await self._tokens.aclose()

    def _see_end(self, new: OutputDelta) -> None:
        if new.ends_early:
            self._client.abort(self._request_id, new.index)
        if new.num_cached_tokens is not None:
            self._has_started = True
        if new.finish_reason == "error":
            # One that never started was refused: the core found that it could not run even alone.
            is_failure = self._has_started and self._is_whole and not new.is_refused
            raise (RequestFailedError if is_failure else RequestError)(str(new.stop_reason))

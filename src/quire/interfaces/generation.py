"""Generation: requests that run together, for one reader. Nothing else stands between the client's mailboxes and
whoever writes an answer.

Owns the texts of what comes (assembly.py), and tells its observer of everything before the reader has it. A stop string
that is met here ends the sequence in the core. It takes no task: the reader is told when something has come, or waits
for it (`items_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from quire.engine_client import AsyncEngineClient, Stream, TokenDelta
from quire.engine_client.mailbox import nobody
from quire.errors import EngineDeadError, RequestError, RequestFailedError
from quire.interfaces.assembly import OutputDelta, RequestAssembly
from quire.interfaces.requests import PreparedRequest
from quire.interfaces.turnstile import Turnstile
from quire.renderer import Renderer

# Tokens and log-probabilities of a sequence that are named whatever others do: else a stream of text that is a few
# tokens behind would wait for all whose answers are large.
_FEW = 16


class OutputObserver(Protocol):
    """Hears of everything before the reader does."""

    def see(self, delta: OutputDelta) -> None:
        """May add to it. What it raises ends the generation for the reader."""

    def fail(self) -> None:
        """The reader is about to get an exception."""

    def close(self) -> None:
        """The reader has left. May come again."""


class Unobserved:
    """The one where nobody wants to know."""

    def see(self, delta: OutputDelta) -> None: ...
    def fail(self) -> None: ...
    def close(self) -> None: ...


class _Request:
    """One that runs."""

    def __init__(
        self, prepared: PreparedRequest, client: AsyncEngineClient, assembly: RequestAssembly, label: _Label
    ) -> None:
        """Starts it. `label`: entered until it is closed, so that its name ends it meanwhile (labels.py)."""
        self.id = prepared.request.request_id
        self.assembly = assembly
        self.is_whole = prepared.is_whole
        self.has_started = False
        self.tokens: Stream[TokenDelta] = prepared.start(client)
        # what was taken of them, and waits for its turn of the event loop
        self.late: list[TokenDelta] = []
        self._label: _Label | None = label
        label.__enter__()

    async def aclose(self) -> None:
        label = self._label
        self._label = None
        if label is not None:
            label.__exit__(None, None, None)
        # else the mailbox and its reader hold each other until the garbage collector comes
        self.tokens.tell(nobody)
        await self.tokens.aclose()


class Generation:
    """What the requests bring, as a Stream of OutputDelta. `aclose` aborts what still runs."""

    def __init__(
        self, client: AsyncEngineClient, renderer: Renderer, observer: OutputObserver, turns: Turnstile
    ) -> None:
        """`turns`: how many tokens become text in a turn of the event loop, and log-probabilities get their names, of
        all generations together. Whoever reads them writes them in the same turn."""
        self._client = client
        self._turns = turns
        self._renderer = renderer
        self._observer = observer
        self._requests: list[_Request] = []
        self._open: set[_Request] = set()
        # Those of which something was heard are asked, however many there are, in the order in which they were heard.
        self._heard: dict[_Request, None] = {}
        self._num_sequences = 0
        self._reader: Callable[[], None] = nobody

    def start(self, prepared: PreparedRequest, label: _Label) -> None:
        """One more. Its sequences have the numbers after those of the others."""
        assembly = RequestAssembly(prepared, self._renderer, self._num_sequences)
        request = _Request(prepared, self._client, assembly, label)
        self._num_sequences += prepared.request.sampling.n
        self._requests.append(request)
        self._open.add(request)
        request.tokens.tell(partial(self._hear, request))
        if request.tokens.has_news:
            self._heard[request] = None

    def tell(self, reader: Callable[[], None]) -> None:
        self._reader = reader

    def _hear(self, *requests: _Request) -> None:
        for request in requests:
            self._heard[request] = None
        self._reader()

    @property
    def has_news(self) -> bool:
        return bool(self._heard)

    @property
    def is_done(self) -> bool:
        return not self._open

    def take(self) -> list[OutputDelta]:
        """A sequence that fails raises RequestFailedError; a request that the engine has no room for even alone, or
        whose form cannot be followed, RequestError; the engine's death raises EngineDeadError."""
        heard = self._heard
        self._heard = {}
        news: list[OutputDelta] = []
        see = self._observer.see
        turns = self._turns
        put_off: list[_Request] = []
        try:
            for request in heard:
                tokens = request.tokens
                push = request.assembly.push
                late: list[TokenDelta] = []
                for delta in request.late or tokens.take():
                    size = delta.size if len(delta.token_ids) > 1 or delta.logprobs or delta.prompt_logprobs else 1
                    # what comes of a prompt stands before what its sequences say
                    if late or (size > _FEW and not turns.left):
                        late.append(delta)
                        continue
                    part = delta
                    if size > _FEW:
                        part = delta.beginning(turns.left)
                        turns.take(part.size)
                        if part is not delta:
                            late.append(delta)
                    new = push(part)
                    if new.finish_reason is not None:
                        # a stop string may be met before what is left
                        late.clear()
                        self._see_end(request, new, delta.index)
                    elif new.num_cached_tokens is not None:
                        request.has_started = True
                    see(new)
                    news.append(new)
                request.late = late
                if late:
                    put_off.append(request)
                elif tokens.is_done:
                    self._open.discard(request)
                elif tokens.has_news:
                    # what ended it may lie behind what came before
                    self._heard[request] = None
        except Exception:  # one that the core refuses included
            self._observer.fail()
            raise
        if put_off:
            # others have their turn before the reader hears of these
            turns.wait(partial(self._hear, *put_off))
        return news

    async def aclose(self) -> None:
        self._observer.close()
        for request in self._requests:
            await request.aclose()

    def _see_end(self, request: _Request, new: OutputDelta, index: int) -> None:
        if new.ends_early:
            self._client.abort(request.id, index)
        if new.num_cached_tokens is not None:
            request.has_started = True
        if new.is_lost:
            raise EngineDeadError(str(new.stop_reason))
        if new.finish_reason == "error":
            # One that never started was refused: the core found that it could not run even alone.
            is_failure = request.has_started and request.is_whole and not new.is_refused
            raise (RequestFailedError if is_failure else RequestError)(str(new.stop_reason))


_Label = AbstractContextManager[None]

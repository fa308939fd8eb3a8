"""Sessions of an AsyncLLM: what session.py says, for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quire.interfaces.assembly import OutputDelta, OutputGatherer
from quire.interfaces.prompts import Prompt
from quire.interfaces.requests import PreparedRequest
from quire.interfaces.session import Conversation, Turn
from quire.interfaces.steps import Steps, outlast
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import RenderedPrompt

_T = TypeVar("_T")


class AsyncSessionEngine(Protocol):
    """What an AsyncSession needs of an AsyncLLM."""

    async def perform(self, steps: Steps[_T]) -> _T: ...
    async def in_text_thread(self, function: Any, *args: Any) -> Any: ...
    def stream(self, prompt: PreparedRequest, *, request_id: str | None = None) -> AsyncIterator[OutputDelta]: ...
    async def abort(self, request_id: str) -> None: ...


class AsyncSession:
    """A conversation of an AsyncLLM. One turn at a time; closing it gives its memory back."""

    def __init__(self, engine: AsyncSessionEngine, conversation: Conversation) -> None:
        self._engine = engine
        self._conversation = conversation
        # What changes the conversation, one after the other; a turn only begins under it.
        self._lock = asyncio.Lock()
        self._turn: AsyncGenerator[OutputDelta, None] | None = None
        self._turn_has_ended = asyncio.Event()

    @property
    def name(self) -> str:
        return self._conversation.name

    @property
    def handle(self) -> str:
        """What the core keeps it under (`control("list_kept")`)."""
        return self._conversation.handle

    @property
    def token_ids(self) -> list[int]:
        """Everything so far: prompts and outputs."""
        return self._conversation.token_ids.copy()

    @property
    def num_tokens(self) -> int:
        return len(self._conversation.token_ids)

    async def generate(
        self, prompt: Prompt | RenderedPrompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """One turn, whole."""
        turn, deltas = await self._begin(prompt, sampling_params)
        gatherer = OutputGatherer(str(turn.prepared.request.request_id), turn.prepared)
        async for delta in deltas:
            gatherer.add(delta)
        output = gatherer.gathered()
        output.prompt_token_ids = turn.added
        return output

    async def stream(
        self, prompt: Prompt | RenderedPrompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[OutputDelta]:
        """One turn as it grows. One that is left before its end changes nothing."""
        _, deltas = await self._begin(prompt, sampling_params)
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()

    async def fork(self, name: str | None = None) -> AsyncSession:
        """A second session with the same past, from where each goes its own way."""
        async with self._lock:
            return AsyncSession(self._engine, await self._engine.perform(self._conversation.fork(name)))

    async def rewind(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        async with self._lock:
            await self._engine.perform(self._conversation.rewind(num_tokens))

    async def close(self) -> None:
        """Ends the turn in flight and gives the memory back; also if it is cancelled meanwhile."""
        await outlast(self._close())

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing session {self.name!r} failed as well: {failure}")

    async def _close(self) -> None:
        async with self._lock:
            await self._end_turn()
            await self._engine.perform(self._conversation.close())

    async def _end_turn(self) -> None:
        """The turn in flight is gone from the engine afterwards."""
        turn = self._turn
        if turn is None or not self._conversation.is_in_turn:
            return
        if not turn.ag_running:  # type: ignore[attr-defined]
            # Its reader has left, and does not come back before it is closed.
            await turn.aclose()
        else:
            await self._engine.abort(self._conversation.handle)
            await self._turn_has_ended.wait()
        if self._conversation.is_in_turn:
            self._conversation.abandon()  # it was closed before it ran

    async def _begin(
        self, prompt: Any, sampling_params: SamplingParams | None
    ) -> tuple[Turn, AsyncGenerator[OutputDelta, None]]:
        kept = self._conversation
        text, added = await self._engine.in_text_thread(kept.rendered, prompt)
        async with self._lock:
            turn = await self._engine.perform(kept.begin(text, added, sampling_params))
            self._turn_has_ended.clear()
            self._turn = self._run(turn)
            return turn, self._turn

    async def _run(self, turn: Turn) -> AsyncGenerator[OutputDelta, None]:
        kept, so_far, has_ended = self._conversation, CompletionOutput(index=0), False
        stream = self._engine.stream(turn.prepared, request_id=kept.handle)
        try:
            async for delta in stream:
                so_far.token_ids += delta.token_ids
                so_far.text += delta.text
                so_far.finish_reason, so_far.stop_reason = delta.finish_reason, delta.stop_reason
                if so_far.is_finished:
                    # before it is handed out: the reader may leave with the last one
                    kept.end(turn, so_far)
                    has_ended = True
                    self._turn_has_ended.set()
                yield delta
        finally:
            try:
                await stream.aclose()  # type: ignore[attr-defined]
            finally:
                if not has_ended:
                    kept.abandon()
                    self._turn_has_ended.set()

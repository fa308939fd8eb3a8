"""Sessions: a conversation whose tokens and blocks stay in the engine between its turns.

    async with await engine.open_session() as session:
        print((await session.generate("Once upon a time")).outputs[0].text)
        print((await session.generate(" And then")).outputs[0].text)

A turn sends only what is new. What the user saw is the truth, and it is kept here (`token_ids`); the core's handle
holds a beginning of it, mostly the whole. What it lacks is sent with the next turn, and found in the prefix cache as
far as full blocks go: so after a stop string, which the core does not know of. Its text was not seen and is not kept.
So it is too after a turn of several outputs (`n`, beams): the session goes on with the first one, which of beams is the
best, and the core's handle stays where it was.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.engine_client import each_of, items_of
from quire.errors import RequestError
from quire.interfaces.adapters import Adapter, Adapters
from quire.interfaces.assembly import OutputDelta, OutputGatherer
from quire.interfaces.engine_calls import EngineCalls, control, outlast, release_if_kept
from quire.interfaces.generation import Generation, OutputObserver, Unobserved
from quire.interfaces.handles import KEPT, checked_name, free_name
from quire.interfaces.hooks.guarded_stream import STOPPED
from quire.interfaces.prompts import Prompt, check_no_media, check_unsalted, render, text_of
from quire.interfaces.requests import PreparedRequest, RequestMaker
from quire.interfaces.structured_outputs import StructuredOutputs
from quire.lora_request import LoRARequest
from quire.messages import Tenancy
from quire.outputs import CompletionOutput, RequestOutput
from quire.parameter_checks import plain
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import RenderedPrompt, Renderer

_T = TypeVar("_T")


class SessionEngine(EngineCalls, Protocol):
    """What a session needs of an AsyncLLM."""

    async def in_text_thread(self, function: Callable[..., _T], *args: Any) -> _T: ...
    async def open_all(
        self, prepared: Sequence[PreparedRequest], observer: OutputObserver, request_id: str | None = None
    ) -> Generation: ...
    async def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """A checked request, and the tokens that it adds to the session: fewer than its prompt, if the core lacks some."""

    prepared: PreparedRequest
    added: list[int]


class Sessions:
    """Those of one engine, and of the engines that take its place; no two that are open have the same name."""

    def __init__(
        self,
        maker: RequestMaker,
        renderer: Renderer,
        defaults: SamplingParams,
        structured: StructuredOutputs,
        adapters: Adapters,
    ) -> None:
        self.maker = maker
        self.structured = structured
        self.adapters = adapters
        self.renderer = renderer
        self.defaults = defaults
        self.names: set[str] = set()
        # how many engines there were before this one
        self.generation = 0
        self._numbers = itertools.count(1)

    def engine_was_replaced(self) -> None:
        """The new one keeps nothing: each session is computed again with its next turn."""
        self.generation += 1

    def open(
        self, engine: SessionEngine, name: str | None, cache_salt: str = "", tenant: Tenancy | None = None
    ) -> AsyncSession:
        name = free_name("session", self.names) if name is None else checked_name(name, "session")
        if name in self.names:
            raise RequestError(
                f"name={name!r}: a session of this name is open. Close it first, or choose another name.", param="name"
            )
        self.names.add(name)
        return AsyncSession(engine, self, name, cache_salt, tenant, f"{KEPT}{name}#{next(self._numbers)}")


class AsyncSession:
    """A conversation of an AsyncLLM. One turn at a time; closing it gives its memory back.

    Owns the tokens of the conversation, and what is known of the core's handle.
    """

    def __init__(
        self,
        engine: SessionEngine,
        sessions: Sessions,
        name: str,
        cache_salt: str,
        tenant: Tenancy | None,
        handle: str,
    ) -> None:
        self.name = name
        # What the core keeps it under (`control("list_kept")`). No two sessions have the same, also one after the
        # other: what an interrupted one has left meets nobody.
        self.handle = handle
        self._engine = engine
        self._sessions = sessions
        self._cache_salt = cache_salt
        self._tenant = tenant
        self._token_ids: list[int] = []
        self._is_closed = False
        self._generation = sessions.generation
        # the core's handle holds the first so many of the tokens
        self._num_kept = 0
        # The core may hold more than that, because a turn ended otherwise than by its own end. Of what it holds the
        # first so many tokens are the same as here.
        self._may_hold_more = False
        self._num_common = 0
        # What changes the session, one after the other; a turn only begins under it.
        self._lock = asyncio.Lock()
        self._is_in_turn = False

    @property
    def token_ids(self) -> list[int]:
        """Everything so far: prompts and outputs."""
        return self._token_ids.copy()

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    # ------------------------------------------------------------------------------------------ a turn

    async def generate(
        self,
        prompt: Prompt | RenderedPrompt,
        sampling_params: GenerationParams | None = None,
        *,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> RequestOutput:
        """One turn, whole: the prompt is appended to what is kept, and so is the output, or the first of several. A
        failed turn changes nothing. A turn whose adapter is another than that of the last one computes what is kept
        again."""
        turn, generation = await self._begin(prompt, sampling_params, Unobserved(), lora_request)
        gatherer = OutputGatherer(str(turn.prepared.request.request_id), turn.prepared)
        async with aclosing(generation):
            await each_of(generation, gatherer.add)
        output = gatherer.gathered()
        # what the user gave, also where the core was sent more
        output.prompt_token_ids = turn.added
        return output

    async def stream(
        self,
        prompt: Prompt | RenderedPrompt,
        sampling_params: GenerationParams | None = None,
        *,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """One turn as it grows. One that is left before its end changes nothing."""
        opened = self.open(prompt, sampling_params, Unobserved(), lora_request=lora_request)
        async with aclosing(await opened) as generation:
            async for delta in items_of(generation):
                yield delta

    async def open(
        self,
        prompt: Prompt | RenderedPrompt,
        sampling_params: GenerationParams | None,
        observer: OutputObserver,
        *,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> Generation:
        """The same for a reader who is told when something has come. It must be closed."""
        return (await self._begin(prompt, sampling_params, observer, lora_request))[1]

    async def _begin(
        self,
        prompt: Any,
        sampling_params: GenerationParams | None,
        observer: OutputObserver,
        lora_request: LoRARequest | Adapter | None,
    ) -> tuple[Turn, Generation]:
        text, added = await self._engine.in_text_thread(self._rendered, prompt)
        async with self._lock:
            turn = await self._checked(text, added, sampling_params, lora_request)
            watch = _TurnWatch(self, turn, observer)
            try:
                return turn, await self._engine.open_all([turn.prepared], watch, self.handle)
            except BaseException:
                self._is_in_turn = False
                raise

    def _rendered(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Text and tokens that a turn adds. A text in the middle gets no special tokens, such as BOS, around it."""
        check_unsalted(prompt, "it belongs to the session. Give it to open_session.")
        text = text_of(prompt)
        length = self._sessions.maker.limits.max_model_len
        if text is not None and self._token_ids:
            return text, self._sessions.renderer.render_continuation(text, max_tokens=length)
        rendered = render(prompt, self._sessions.renderer, length)
        check_no_media(rendered.media, "a turn of a session")
        return rendered.text, rendered.token_ids

    async def _checked(
        self,
        text: str | None,
        added: list[int],
        sampling: GenerationParams | None,
        lora_request: LoRARequest | Adapter | None,
    ) -> Turn:
        """The session is in its turn afterwards."""
        sampling = sampling if sampling is not None else self._sessions.defaults
        _check_sampling(sampling)
        self._check_free()
        self._is_in_turn = True
        try:
            await self._settle()
            await self._sessions.structured.check(self._engine, sampling)
            adapter = await self._sessions.adapters.number_of(self._engine, lora_request)
            request = self._sessions.maker.make(
                self._token_ids[self._num_kept :] + added,
                sampling,
                cache_salt=self._cache_salt,
                tenant=self._tenant,
                adapter=adapter,
                keep=self.handle if isinstance(sampling, SamplingParams) and sampling.n == 1 else None,
                continues=self.handle if self._num_kept else None,
                num_kept_tokens=self._num_kept,
            )
        except BaseException:
            self._is_in_turn = False
            raise
        before = self._token_ids[: self._num_kept]
        return Turn(PreparedRequest(request, text, sampling.logprobs is not None, before), added)

    def _end(self, turn: Turn, output: CompletionOutput) -> None:
        """The turn has brought this. One that failed changes nothing."""
        if output.finish_reason not in ("stop", "length", STOPPED):
            self._abandon()
            return
        self._is_in_turn = False
        self._token_ids = [*self._token_ids, *turn.added]
        if isinstance(output.stop_reason, str):
            # A stop string is met here, not in the core, and so is a hook's stop: it kept nothing, or more, if it had
            # ended by itself.
            whole, rest = self._tokens_of_text(turn, output)
            self._may_hold_more = True
            self._num_common = len(self._token_ids) + len(whole)
            self._token_ids += whole + rest
        else:
            self._token_ids += output.token_ids
            if turn.prepared.request.keep is not None:
                self._num_kept = len(self._token_ids)

    def _abandon(self) -> None:
        """The turn was broken off: Ctrl-C, a cancelled task."""
        self._is_in_turn = False
        self._may_hold_more = True
        self._num_common = len(self._token_ids)

    def _tokens_of_text(self, turn: Turn, output: CompletionOutput) -> tuple[list[int], list[int]]:
        """The tokens that lie before a stop string, and those of what is left of a token that it has cut."""
        renderer = self._sessions.renderer
        request = turn.prepared.request
        sampling = SamplingParams(skip_special_tokens=request.sampling.skip_special_tokens)
        stream = renderer.open_stream([*turn.prepared.before, *request.prompt_token_ids], sampling)
        num_whole = 0
        num_characters = 0
        length = 0
        for count, token_id in enumerate(output.token_ids, 1):
            length += len(stream.push([token_id], is_last=False).text)
            # the first token that reaches it: later ones may hold the bytes of an unfinished character
            if num_characters < length <= len(output.text):
                num_whole = count
                num_characters = length
        rest = output.text[num_characters:]
        limit = self._sessions.maker.limits.max_model_len
        return output.token_ids[:num_whole], renderer.render_continuation(rest, max_tokens=limit) if rest else []

    # ------------------------------------------------------------------------------------------ between turns

    async def fork(self, name: str | None = None) -> AsyncSession:
        """A second session with the same past, from where each goes its own way."""
        async with self._lock:
            self._check_free()
            await self._settle()
            child = self._sessions.open(self._engine, name, self._cache_salt, self._tenant)
            try:
                if self._num_kept:
                    await control(self._engine, "fork_kept", handle=self.handle, into=child.handle)
            except BaseException:
                # interrupted, it may be there or on its way
                await child.close()
                raise
            child._token_ids = self._token_ids.copy()
            child._num_kept = self._num_kept
            return child

    async def rewind(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        async with self._lock:
            self._check_free()
            num_tokens = plain(num_tokens)
            if type(num_tokens) is not int or not 0 <= num_tokens <= len(self._token_ids):
                raise RequestError(
                    f"num_tokens={num_tokens!r}: must be a whole number between 0 and {len(self._token_ids)}, the "
                    f"tokens of session {self.name!r}.",
                    param="num_tokens",
                )
            await self._settle()
            if num_tokens < self._num_kept:
                # interrupted, the core may hold less than is believed
                self._may_hold_more = True
                self._num_common = num_tokens
                await self._cut_kept(num_tokens)
                self._may_hold_more = False
            del self._token_ids[num_tokens:]

    async def close(self) -> None:
        """Ends the turn in flight and gives everything back; also if it is cancelled meanwhile. May be called twice,
        and after the engine's end."""
        await outlast(self._close())

    async def _close(self) -> None:
        async with self._lock:
            await self._end_turn()
            if self._is_closed:
                return
            try:
                await release_if_kept(self._engine, self.handle)
            finally:
                self._is_closed = True
                self._sessions.names.discard(self.name)

    async def _end_turn(self) -> None:
        """The turn in flight is gone from the engine afterwards. Its reader, if there still is one, hears of it."""
        if self._is_in_turn:
            await self._engine.abort(self.handle)
            self._abandon()

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

    # ------------------------------------------------------------------------------------------ inside

    def _check_free(self) -> None:
        if self._is_closed:
            raise RequestError(f"session {self.name!r} is closed. Open another one.")
        if self._is_in_turn:
            raise RequestError(
                f"session {self.name!r} is in the middle of a turn, and has one at a time. Wait for its end, or "
                "fork it before the turn begins. (A stream that is left early ends its turn with aclose().)"
            )

    async def _settle(self) -> None:
        """Brings the core's handle to a beginning of the tokens, if it may be something else."""
        if self._generation != self._sessions.generation:
            self._generation = self._sessions.generation
            self._num_kept = 0
            self._may_hold_more = False
        if not self._may_hold_more:
            return
        entries = await control(self._engine, "list_kept")
        num_held = next((entry["num_tokens"] for entry in entries if entry["handle"] == self.handle), 0)
        self._num_kept = min(num_held, self._num_common)
        if num_held > self._num_kept:
            await self._cut_kept(self._num_kept)
        self._may_hold_more = False

    async def _cut_kept(self, num_tokens: int) -> None:
        if num_tokens:
            await control(self._engine, "rewind_kept", handle=self.handle, num_tokens=num_tokens)
        else:
            await control(self._engine, "release_kept", handle=self.handle)
        self._num_kept = num_tokens


def _check_sampling(sampling: GenerationParams) -> None:
    if isinstance(sampling, BeamSearchParams):
        return
    if not isinstance(sampling, SamplingParams):
        raise RequestError(
            f"sampling_params={type(sampling).__name__}: a turn of a session takes SamplingParams or BeamSearchParams.",
            param="sampling_params",
        )
    if sampling.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs={sampling.prompt_logprobs}: a session computes only what is new, so it has none for what "
            "is kept. Leave it out, or send the whole as a prompt of its own.",
            param="prompt_logprobs",
        )


class _TurnWatch:
    """Hears of a turn before its reader does, who may leave with the last part."""

    def __init__(self, session: AsyncSession, turn: Turn, observer: OutputObserver) -> None:
        self._session = session
        self._turn = turn
        self._observer = observer
        # the session goes on with this one
        self._first = CompletionOutput(index=0)
        self._num_open = turn.prepared.request.sampling.n

    def see(self, delta: OutputDelta) -> None:
        if delta.index == 0:
            first = self._first
            first.token_ids += delta.token_ids
            first.text += delta.text
            first.finish_reason = delta.finish_reason
            first.stop_reason = delta.stop_reason
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._session._end(self._turn, self._first)
        self._observer.see(delta)

    def fail(self) -> None:
        self._observer.fail()

    def close(self) -> None:
        if self._num_open:
            self._session._abandon()
        self._observer.close()

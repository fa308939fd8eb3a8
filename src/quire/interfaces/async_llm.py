"""AsyncLLM: requests that come and go on an event loop, for servers. Outputs are streams.

    engine = AsyncLLM(model=...)
    async for output in engine.generate("Hello", SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)

Owns an engine, by default in a process of its own. A stream whose reader goes away is aborted. Everything but
`from_config` and the constructor belongs to the thread of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.config import EMBEDDED, EngineConfig
from quire.engine_client import AsyncEngineClient, open_link
from quire.errors import EngineDeadError, EngineError, RequestError, RequestFailedError
from quire.interfaces.assembly import OutputDelta, OutputGatherer, RequestAssembly
from quire.interfaces.async_session import AsyncSession
from quire.interfaces.beams import beam_search_output, check_beams
from quire.interfaces.labels import Labels
from quire.interfaces.memory_account import MemoryAccount
from quire.interfaces.pinned_prefixes import PinnedPrefix, PinnedPrefixes
from quire.interfaces.prompts import Prompt, render, text_of
from quire.interfaces.received_request import ReceivedRequest
from quire.interfaces.requests import PreparedRequest, RequestMaker, checked_cache_salt
from quire.interfaces.session import Conversations
from quire.interfaces.setup import configured, default_sampling_params, log_report, request_maker
from quire.interfaces.steps import Call, Control, Step, Steps, perform_async
from quire.interfaces.streamed_prompt import Piece, PromptFeed
from quire.interfaces.structured_outputs import StructuredOutputs
from quire.interfaces.text_threads import LONG_TEXT, TextThreads
from quire.messages import EngineReady
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import RenderedPrompt, Renderer

_T = TypeVar("_T")
# Whole, prepared, or arriving in pieces.
AnyPrompt: TypeAlias = "Prompt | RenderedPrompt | PreparedRequest | AsyncIterable[Piece]"


class AsyncLLM:
    """An engine for streams. Keywords are the engine's options (docs/options.md)."""

    def __init__(self, model: str = EMBEDDED, **options: Any) -> None:
        self._set_up(configured({"model": model, **options}))

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, renderer: Renderer | None = None, client: AsyncEngineClient | None = None
    ) -> AsyncLLM:
        """From a resolved configuration; with a renderer or an engine client that was made elsewhere."""
        engine = cls.__new__(cls)
        engine._set_up(config, renderer, client)
        return engine

    def _set_up(
        self, config: EngineConfig, renderer: Renderer | None = None, client: AsyncEngineClient | None = None
    ) -> None:
        self.config = config
        self._renderer = renderer
        self._client = client
        self._maker: RequestMaker | None = None
        self._structured: StructuredOutputs | None = None
        self._prefixes: PinnedPrefixes | None = None
        self._conversations: Conversations | None = None
        self._defaults = default_sampling_params(config)
        self._labels = Labels()
        self._start_lock = asyncio.Lock()
        self._text_threads = TextThreads()
        self._form_threads = TextThreads(1)  # a form that takes long to check must not hold up texts
        self._is_shut_down = False

    # ------------------------------------------------------------------------------------------ starting, ending

    async def start(self) -> EngineReady:
        """Loads tokenizer and model. May be called again; everything that needs the engine calls it."""
        if self._maker is not None and self._client is not None:
            return self._client.ready
        async with self._start_lock:
            if self._is_shut_down:
                raise EngineDeadError("The engine was shut down.")
            try:
                return await self._start()
            except BaseException:
                # a cancelled or failed start leaves no process behind
                self._maker = None
                if self._client is not None:
                    self._client.close()
                    self._client = None
                raise

    async def _start(self) -> EngineReady:
        if self._client is None:
            in_own_process = self.config.engine_process is not False
            # `core`'s process starts before the tokenizer is read, so that both load at the same time
            self._client = AsyncEngineClient(open_link(self.config, in_own_process=in_own_process, is_async=True))
        if self._renderer is None:
            from quire.renderer import Renderer

            self._renderer = await asyncio.to_thread(Renderer.from_config, self.config)
        ready = await self._client.wait_ready()
        log_report(ready)
        self._maker = request_maker(self.config, ready, self._renderer)
        self._structured = StructuredOutputs(self._renderer, self._maker.limits.vocab_size)
        self._prefixes = PinnedPrefixes(self.config, self._maker, self._renderer)
        self._conversations = Conversations(self._maker, self._renderer, self._defaults, self._structured)
        if self.config.pinned_prefixes is not None:
            await self.perform(self._prefixes.pin_file(self.config.pinned_prefixes))
        return ready

    def shutdown(self) -> None:
        """Ends the engine; what is in flight raises EngineDeadError. Takes up to three seconds."""
        self._is_shut_down = True
        structured: StructuredOutputs | None = self.__dict__.get("_structured")
        if structured is not None:
            structured.close()
        client: AsyncEngineClient | None = self.__dict__.get("_client")
        if client is not None:
            client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # Also of an object whose constructor raised, and at the end of the interpreter, when modules may be gone.
        try:
            if "_is_shut_down" in self.__dict__:
                self.shutdown()
        except Exception:
            return

    # ------------------------------------------------------------------------------------------ state

    @property
    def renderer(self) -> Renderer:
        if self._renderer is None:
            raise EngineError("The engine was not started yet: await start() first.")
        return self._renderer

    @property
    def ready(self) -> EngineReady:
        """What the engine has room for, once it has started."""
        if self._client is None:
            raise EngineError("The engine was not started yet: await start() first.")
        return self._client.ready

    @property
    def is_running(self) -> bool:
        return self._maker is not None and not self._is_shut_down and not self.errored

    @property
    def errored(self) -> bool:
        """The engine is dead, and nobody asked for it."""
        return self.dead_reason is not None

    @property
    def dead_reason(self) -> str | None:
        if self._client is None or self._is_shut_down:
            return None
        return self._client.failure

    @property
    def num_open_requests(self) -> int:
        return self._client.num_open if self._client is not None else 0

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend."""
        return self._defaults.replace()

    # ------------------------------------------------------------------------------------------ generating

    async def prepare(
        self,
        prompt: Prompt | RenderedPrompt,
        sampling_params: GenerationParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PreparedRequest:
        """Tokenises and checks a request without starting it; raises RequestError where it cannot be served."""
        await self.start()
        assert self._maker is not None
        assert self._structured is not None
        text, length = text_of(prompt), self._maker.limits.max_model_len
        if text is not None and len(text) > LONG_TEXT:
            text, token_ids, media = await self._text_threads.call(render, prompt, self.renderer, length)
        else:
            text, token_ids, media = render(prompt, self.renderer, length)
        params = sampling_params if sampling_params is not None else self._defaults
        await self.perform(self._structured.check(params))
        request = self._maker.make(token_ids, params, priority=priority, cache_salt=cache_salt, media=media)
        return PreparedRequest(request, text, params.logprobs is not None)

    async def receive(
        self,
        pieces: AsyncIterable[Piece],
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> ReceivedRequest:
        """Computes a prompt while it arrives, in texts or in token ids (4.4.4); returns when the last piece has come.

        What it returns runs already: give it to `stream` or `generate`, or close it. Both also take the pieces
        themselves.
        """
        await self.start()
        assert self._maker is not None
        assert self._structured is not None
        assert self._client is not None
        params = sampling_params if sampling_params is not None else self._defaults
        await self.perform(self._structured.check(params))
        request = self._maker.make([], params, priority=priority, cache_salt=cache_salt, is_final=False)
        feed = PromptFeed(
            self._client,
            self._maker,
            self._text_threads,
            partial(
                self.renderer.open_text,
                max_tokens=self._maker.limits.max_model_len,
                add_special_tokens=add_special_tokens,
            ),
        )
        with self._labels.borne(request_id, feed.abort):
            return await feed.run(pieces, request, shows_logprobs=params.logprobs is not None)

    async def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """The request as it grows: each output holds everything so far, or with delta=True what is new in one sequence.

        An asynchronous iterator as prompt is computed while it arrives; what is generated comes after its end.
        Of beams (BeamSearchParams) come the tokens that all of them share, and at the end the rest, best first.
        `request_id` is a label for outputs and for `abort`; two requests may bear the same one.
        """
        prepared = await self._prepared(prompt, sampling_params, request_id, priority)
        label = request_id if request_id is not None else str(prepared.request.request_id)
        gatherer = OutputGatherer(label, prepared)
        stream = self.stream(prepared, request_id=label)
        try:
            async for new in stream:
                if delta:
                    yield gatherer.only(new)
                else:
                    gatherer.add(new)
                    yield gatherer.snapshot()
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def beam_search(
        self,
        prompt: AnyPrompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> BeamSearchOutput:
        """The best continuations of the prompt, best first, when all are found; `generate` streams them."""
        check_beams(params)
        prepared = await self._prepared(prompt, params, request_id, priority)
        label = request_id if request_id is not None else str(prepared.request.request_id)
        gatherer = OutputGatherer(label, prepared)
        async for new in self.stream(prepared, request_id=label):
            gatherer.add(new)
        return beam_search_output(gatherer.gathered(), params, self.renderer)

    async def stream(
        self,
        prompt: AnyPrompt,
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[OutputDelta]:
        """What is new, sequence by sequence, at the least cost per token. What arrives while the reader is busy comes
        as one delta. A sequence that fails raises RequestFailedError, a request that the engine has no room for even
        alone RequestError; the engine's death raises EngineDeadError."""
        prepared = await self._prepared(prompt, sampling_params, request_id, priority)
        request, client = prepared.request, self._client
        assert client is not None
        deltas = prepared.start(client)
        has_started = False
        try:
            assembly = RequestAssembly(prepared, self.renderer)
            with self._labels.borne(request_id, partial(client.abort, request.request_id)):
                async for delta in deltas:
                    new = assembly.push(delta)
                    if new.ends_early:
                        client.abort(request.request_id, new.index)
                    has_started = has_started or new.num_cached_tokens is not None
                    if new.finish_reason == "error":
                        # One that never started was refused: the core found that it could not run even alone.
                        is_failure = has_started and prepared.is_whole
                        raise (RequestFailedError if is_failure else RequestError)(str(new.stop_reason))
                    yield new
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_id: str) -> None:
        """Ends all requests that bear this label; their streams close with finish reason "abort"."""
        self._labels.abort(request_id)

    # ------------------------------------------------------------------------------------------ keeping

    async def pin_prefix(
        self, prompt: Prompt | Sequence[Mapping[str, Any]], name: str | None = None, *, cache_salt: str | None = None
    ) -> PinnedPrefix:
        """Computes the beginning of later prompts once and keeps it for good; see LLM.pin_prefix."""
        await self.start()
        assert self._prefixes is not None
        token_ids = await self.in_text_thread(self._prefixes.token_ids_of, prompt)
        return await self.perform(self._prefixes.pin(token_ids, name, checked_cache_salt(cache_salt)))

    async def unpin_prefix(self, name: str) -> None:
        await self.start()
        assert self._prefixes is not None
        await self.perform(self._prefixes.unpin(name))

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """What is pinned, with its size and its use so far."""
        await self.start()
        assert self._prefixes is not None
        return await self.perform(self._prefixes.all())

    async def open_session(self, name: str | None = None, *, cache_salt: str | None = None) -> AsyncSession:
        """A conversation whose tokens stay in the engine between its turns, until it is closed."""
        await self.start()
        assert self._conversations is not None
        return AsyncSession(self, self._conversations.open(name, checked_cache_salt(cache_salt)))

    async def perform(self, steps: Steps[_T]) -> _T:
        """Carries out what prefixes and sessions are made of (interfaces/steps.py)."""
        return await perform_async(steps, self._do)

    async def in_text_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Renders or tokenises while the event loop goes on."""
        return await self._text_threads.call(function, *args)

    # ------------------------------------------------------------------------------------------ managing

    async def memory(self) -> MemoryAccount:
        """Where every slot of the KV cache is; print it."""
        return MemoryAccount.of(await self.control("memory"))

    async def statistics(self) -> dict[str, float]:
        """The engine's counters, and the client's."""
        core = await self.control("statistics")
        assert self._client is not None and self._structured is not None  # noqa: PT018 - it has started
        return {**core, **await self.perform(self._structured.statistics()), **self._client.statistics()}

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        """A management operation of the engine, such as reset_prefix_cache."""
        await self.start()
        assert self._client is not None
        return await self._client.control(name, args)

    # ------------------------------------------------------------------------------------------ inside

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Control):
            return await self.control(step.name, step.args)
        if isinstance(step, Call):
            return await self._form_threads.call(step.function, *step.args)
        prepared = PreparedRequest(step.request, None, shows_logprobs=False)
        gatherer = OutputGatherer(str(step.request.request_id), prepared)
        async for delta in self.stream(prepared):
            gatherer.add(delta)
        return gatherer.gathered()

    async def _prepared(
        self, prompt: AnyPrompt, sampling_params: GenerationParams | None, request_id: str | None, priority: int
    ) -> PreparedRequest:
        if isinstance(prompt, PreparedRequest):
            return prompt
        if isinstance(prompt, AsyncIterable):
            return await self.receive(prompt, sampling_params, request_id, priority=priority)
        return await self.prepare(prompt, sampling_params, priority=priority)

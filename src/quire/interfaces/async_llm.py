"""AsyncLLM: requests that come and go on an event loop, for servers. Outputs are streams.

    engine = AsyncLLM(model=...)
    async for output in engine.generate("Hello", SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)

Owns an engine, by default in a process of its own: it is started at first need, replaced when it has died, ended once.
The parts (engine_parts.py) outlive it: a new one is brought to where the old one was. Whoever restarts it decides when
another try is due: between two of them that failed, nobody else starts one. A stream whose reader goes away is aborted.
Everything but `from_config` and the constructor belongs to the thread of one event loop.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.config import EMBEDDED, EngineConfig
from quire.config.arithmetic import has_experts
from quire.config.speech_tokens import SpeechTokens
from quire.engine_client import AsyncEngineClient, items_of, open_link
from quire.errors import EngineDeadError, EngineError, RequestError
from quire.hooks import Hook
from quire.interfaces.adapters import Adapter
from quire.interfaces.assembly import OutputDelta, OutputGatherer
from quire.interfaces.beams import beam_search_output, check_beams
from quire.interfaces.class_labels import CLASSIFY, EMBED, SCORE, ClassLabels
from quire.interfaces.embeddings import PreparedEmbedding, classification, embedded, scoring
from quire.interfaces.engine_parts import EngineParts
from quire.interfaces.generation import Generation, OutputObserver, Unobserved
from quire.interfaces.hooks.engine import EngineOfHooks
from quire.interfaces.hooks.guarded_client import open_client
from quire.interfaces.hooks.judging import Hooks
from quire.interfaces.hooks.loading import hooks_of, names_among
from quire.interfaces.hooks.unhooked import unhooked
from quire.interfaces.image_rendering import SOUNDS, ImageRendering
from quire.interfaces.jobs import Job, run_jobs
from quire.interfaces.labels import Labels
from quire.interfaces.memory_account import MemoryAccount
from quire.interfaces.pinned_prefixes import PinnedPrefix
from quire.interfaces.prompts import (
    Prompt,
    are_vectors,
    images_of,
    render,
    salt_of,
    sound_of,
    text_of,
    videos_of,
)
from quire.interfaces.received_request import ReceivedRequest
from quire.interfaces.recording import read_recording
from quire.interfaces.requests import PreparedRequest, checked_cache_salt
from quire.interfaces.session import AsyncSession
from quire.interfaces.setup import configured, default_sampling_params, log_report
from quire.interfaces.streamed_prompt import Piece, PromptFeed
from quire.interfaces.text_threads import LONG_TEXT, TextThreads
from quire.interfaces.transcription import Transcription, TranscriptionParams
from quire.interfaces.turnstile import Turnstile
from quire.interfaces.weights import UpdatedWeights
from quire.lora_request import LoRARequest
from quire.messages import EngineReady, EngineRequest, Tenancy
from quire.observability.recorded import Recording
from quire.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    Transcript,
)
from quire.pooling_params import PoolingParams
from quire.renderer import RenderedPrompt
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine_client.engine_process import EngineProcess
    from quire.engine_client.replica_link import Loss
    from quire.renderer import Renderer
    from quire.renderer.sounds import Sound

_T = TypeVar("_T")
# Tokens that become text in a turn of the event loop, and log-probabilities that become text and JSON: some 20 ms.
_MOST_OF_TURN = 4_000
# Whole, prepared, or arriving in pieces.
AnyPrompt: TypeAlias = "Prompt | RenderedPrompt | PreparedRequest | AsyncIterable[Piece]"
Connect: TypeAlias = Callable[[EngineConfig], AsyncEngineClient]


def connect(config: EngineConfig, hooks: Hooks) -> AsyncEngineClient:
    """Starts an engine where the configuration wants it: by default in a process of its own."""
    return open_client(open_link(config, in_own_process=config.engine_process is not False), hooks)


class AsyncLLM:
    """An engine for streams. Keywords are the engine's options (docs/options.md)."""

    def __init__(self, model: str = EMBEDDED, *, hooks: Sequence[str | Hook] = (), **options: Any) -> None:
        config = configured({"model": model, "hooks": names_among(hooks), **options})
        self._set_up(config, hooks=hooks_of(config, hooks))

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        renderer: Renderer | None = None,
        client: AsyncEngineClient | None = None,
        hooks: Hooks | None = None,
    ) -> AsyncLLM:
        """From a resolved configuration; with a renderer or an engine client that was made elsewhere, and the hooks
        that this client asks."""
        engine = cls.__new__(cls)
        engine._set_up(config, renderer, client, hooks)
        return engine

    def _set_up(
        self,
        config: EngineConfig,
        renderer: Renderer | None = None,
        client: AsyncEngineClient | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        if config.data_parallel_size > 1 and not config.prefix_hash_key:
            # whoever routes to the replicas, here or in another process, names blocks as they do
            config = replace(config, prefix_hash_key=os.urandom(32))
        self.config = config
        self.hooks = hooks_of(config) if hooks is None else hooks
        self._defaults = default_sampling_params(config)
        self._connect: Connect = partial(connect, hooks=self.hooks)
        self._are_hooks_open = False
        self._renderer = renderer
        self._client = client
        self._parts: EngineParts | None = None
        # while there is an engine that has started
        self._ready: EngineReady | None = None
        self._is_shut_down = False
        # it was ended by who uses it, to be started again by them
        self.is_asleep = False
        # its end was seen, and no other one serves yet
        self._is_being_replaced = False
        self._losses: list[Loss] = []
        # hears at once of replicas that have died
        self._tell_loss: Callable[[Loss], None] = lambda loss: None
        self._lock = asyncio.Lock()
        self._labels = Labels()
        # of all answers together
        self.answer_turns = Turnstile(_MOST_OF_TURN)
        self._class_labels = ClassLabels(config.facts)
        self._text_threads = TextThreads()
        self._images = ImageRendering(config.images)
        self._form_threads = TextThreads(1)  # a form that takes long to check must not hold up texts

    # ------------------------------------------------------------------------------------------ starting, ending

    async def start(self) -> EngineReady:
        """Loads tokenizer and model, unless that is done; everything that needs the engine calls it. Takes the place of
        no engine that died: restart does."""
        if self._ready is not None:
            return self._ready
        async with self._lock:
            if self._ready is not None:
                return self._ready
            if self._is_being_replaced or self.is_asleep:
                raise self._absent()
            return await self._start()

    async def restart(self, reason: str = "The engine is started again.") -> EngineReady:
        """Puts a new engine in the place of this one, which mostly is dead. What is in flight raises EngineDeadError.
        Pinned prefixes are computed again now, sessions with their next turn. May be called again after it has
        failed."""
        async with self._lock:
            self._is_being_replaced = True
            await self._end(reason)
            ready = await self._start()
            self._is_being_replaced = False
            self.is_asleep = False
            return ready

    async def sleep(self) -> None:
        """Weights and KV cache leave memory: the engine ends, and what is in flight raises EngineDeadError. Nothing but
        `wake_up` and `restart` starts another one."""
        async with self._lock:
            self.is_asleep = True
            await self._end("The engine was put to sleep.")

    async def wake_up(self) -> EngineReady:
        """Starts it as it was made, from the model's files; what was pinned and loaded comes back as after `restart`.
        One that cannot start sleeps on."""
        return await self.restart("The engine sleeps.") if self.is_asleep else await self.start()

    async def _started(self) -> EngineParts:
        await self.start()
        assert self._parts is not None
        return self._parts

    async def _start(self) -> EngineReady:
        if self._is_shut_down:
            raise EngineDeadError("The engine was shut down.")
        try:
            self._ready = await self._open()
            await self._open_hooks()
            assert self._parts is not None
            await self._parts.furnish(self)
        except BaseException:
            # a cancelled or failed start leaves no process behind
            self._ready = None
            if self._client is not None:
                self._client.close()
                self._client = None
            raise
        return self._ready

    async def _open(self) -> EngineReady:
        if self._client is None:
            # the core's process starts before the tokenizer is read, so that both load at the same time
            self._client = self._connect(self.config)
        if self._renderer is None:
            from quire.renderer import Renderer

            self._renderer = await asyncio.to_thread(Renderer.from_config, self.config)
        self.hooks.renderer = self._renderer
        self._client.watch_losses(self._teller_of_losses())
        ready = await self._client.wait_ready()
        log_report(ready)
        if self._parts is None:
            self._parts = EngineParts(self.config, ready, self._renderer, self._defaults)
        else:
            self._parts.engine_was_replaced(ready)
        if self._client.is_in_process and self.config.worker.grid.size == 1:
            self._parts.maker.limits = replace(self._parts.maker.limits, is_here=True)
        return ready

    async def _open_hooks(self) -> None:
        """Once, beside the event loop: they may load what they need, and ask the engine."""
        if self.hooks and not self._are_hooks_open:
            await asyncio.to_thread(self.hooks.open, EngineOfHooks(self, asyncio.get_running_loop()))
            self._are_hooks_open = True

    async def _end(self, reason: str) -> None:
        client = self._client
        self._client = None
        self._ready = None
        self._losses = []
        if client is not None:
            client.kill(reason)
            await asyncio.to_thread(client.close)

    def shutdown(self) -> None:
        """Ends the engine; what is in flight raises EngineDeadError. Takes up to two seconds."""
        self._is_shut_down = True
        if self._parts is not None:
            self._parts.close()
        if self._client is not None:
            self._client.close()
        self.hooks.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # Also of an object whose constructor raised, and at the end of the interpreter, when modules may be gone.
        try:
            if "_lock" in self.__dict__:
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
        if self._ready is None:
            raise EngineError("The engine was not started yet: await start() first.")
        return self._ready

    @property
    def is_running(self) -> bool:
        return self._ready is not None and not self._is_shut_down and not self.errored

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
    def processes(self) -> tuple[EngineProcess, ...]:
        """The engine's own process, or those of its replicas, for whoever watches over them."""
        return self._client.processes if self._client is not None else ()

    def watch_losses(self, tell: Callable[[Loss], None]) -> None:
        """Has it called as soon as a replica has died while others go on. Somebody must replace it all the same."""
        self._tell_loss = tell

    def take_losses(self) -> list[Loss]:
        """Replicas that have died, while others go on, and that nobody has taken care of."""
        losses = self._losses
        self._losses = []
        return losses

    def _teller_of_losses(self) -> Callable[[Loss], None]:
        """The link must not keep an engine that is forgotten, and then ends."""
        lost = weakref.WeakMethod(self._lost)

        def tell(loss: Loss) -> None:
            if (hear := lost()) is not None:
                hear(loss)

        return tell

    def _lost(self, loss: Loss) -> None:
        self._losses.append(loss)
        self._tell_loss(loss)
        if self._parts is not None:
            self._parts.replica_was_lost()

    async def restart_replica(self, number: int) -> None:
        """Starts another one in the place of one that has died, with the adapters and pinned prefixes of the others;
        it takes requests when all is there."""
        async with self._lock:
            await self._running.control("replicas.start", {"number": number})
            assert self._parts is not None
            await self._parts.furnish_replica(self, number)

    def kill(self, reason: str) -> None:
        """Ends the engine by force; what is in flight raises EngineDeadError with this reason."""
        if self._client is not None:
            self._client.kill(reason)

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
        tenant: Tenancy | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> PreparedRequest:
        """Tokenises and checks a request without starting it; raises RequestError where it cannot be served."""
        parts = await self._started()
        rendered = prompt if isinstance(prompt, RenderedPrompt) else await self._rendered(prompt, parts)
        params = sampling_params if sampling_params is not None else self._defaults
        if isinstance(params, GenerationParams) and params.structured_outputs is not None:
            await parts.structured.check(self, params)
        if isinstance(prompt, Mapping):
            cache_salt = salt_of(prompt, cache_salt)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "tenant": tenant}
        adapter = await parts.adapters.number_of(self, lora_request) if lora_request is not None else 0
        request = parts.maker.make(rendered.token_ids, params, media=rendered.media, adapter=adapter, **options)
        return PreparedRequest(request, rendered.text, params.logprobs is not None)

    async def receive(
        self,
        pieces: AsyncIterable[Piece],
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        tenant: Tenancy | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> ReceivedRequest:
        """Computes a prompt while it arrives, in texts or in token ids (4.4.4); returns when the last piece has come.
        What it returns runs already: give it to `stream` or `generate`, which take pieces as well, or close it."""
        parts = await self._started()
        params = sampling_params if sampling_params is not None else self._defaults
        await parts.structured.check(self, params)
        adapter = await parts.adapters.number_of(self, lora_request)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "tenant": tenant, "adapter": adapter}
        request = parts.maker.make([], params, is_final=False, **options)
        feed = PromptFeed(
            self._running,
            parts.maker,
            self._text_threads,
            partial(
                self.renderer.open_text,
                max_tokens=parts.maker.limits.max_model_len,
                add_special_tokens=add_special_tokens,
            ),
        )
        with self._borne(request_id, feed.abort):
            return await feed.run(pieces, request, shows_logprobs=params.logprobs is not None)

    async def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        delta: bool = False,
        in_bursts: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The request as it grows: each output holds everything so far, or with delta=True what is new in one sequence.

        An asynchronous iterator as prompt is computed while it arrives; what is generated comes after its end.
        Of beams (BeamSearchParams) come the tokens that all of them share, and at the end the rest, best first.
        in_bursts=True: several tokens may take 200 ms and come together, which is faster where one takes little time.
        `request_id` is a label for outputs and for `abort`; two requests may bear the same one.
        """
        prepared = await self._prepared(prompt, sampling_params, request_id, priority, lora_request)
        prepared.request.in_bursts = in_bursts
        label = prepared.label(request_id)
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
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """The best continuations of the prompt, best first, when all are found; `generate` streams them."""
        check_beams(params)
        prepared = await self._prepared(prompt, params, request_id, priority, lora_request)
        return beam_search_output(await self._gathered(prepared, request_id), params, self.renderer)

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
        stream = await self.open(prompt, sampling_params, request_id, priority=priority)
        try:
            async for delta in items_of(stream):
                yield delta
        finally:
            await stream.aclose()

    async def open(
        self,
        prompt: AnyPrompt,
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> Generation:
        """Starts a request for a reader who is told when something has come (`tell`), instead of waiting for it.
        It must be closed (`aclose`), which aborts what still runs."""
        prepared = await self._prepared(prompt, sampling_params, request_id, priority)
        return await self.open_all([prepared], Unobserved(), request_id)

    async def open_all(
        self, prepared: Sequence[PreparedRequest], observer: OutputObserver, request_id: str | None = None
    ) -> Generation:
        """The same of several that run together. Sequence j of request i has the index i * n + j."""
        client = self._running
        generation = Generation(client, self.renderer, observer, self.answer_turns)
        try:
            for one in prepared:
                generation.start(one, self._borne(request_id, partial(client.abort, one.request.request_id)))
                if len(prepared) > 1:
                    # others have their turn between many
                    await asyncio.sleep(0)
        except BaseException as error:
            if isinstance(error, Exception):
                observer.fail()
            await generation.aclose()
            raise
        return generation

    def _borne(self, label: str | None, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """While the request runs, its label ends it, if it has one."""
        return nullcontext() if label is None else self._labels.borne(label, abort)

    async def embed(
        self,
        prompt: Prompt | RenderedPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: Tenancy | None = None,
        on_start: Callable[[int], None] = lambda num_cached_tokens: None,
        lora_request: LoRARequest | Adapter | None = None,
        task: str = EMBED,
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt. Errors are those of `stream`; who is cancelled aborts the request. `task`: classify
        or score, for the numbers that a head of labels has for it."""
        asked = await self.prepare_embedding(
            prompt,
            pooling_params,
            task=task,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            lora_request=lora_request,
        )
        client = self._running
        with self._borne(request_id, partial(client.abort, asked.request.request_id)):
            return await embedded(asked, client, on_start, request_id)

    async def prepare_embedding(
        self,
        prompt: Prompt | RenderedPrompt,
        pooling_params: PoolingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: Tenancy | None = None,
        lora_request: LoRARequest | Adapter | None = None,
        task: str = EMBED,
    ) -> PreparedEmbedding:
        """Tokenises and checks a request for a vector without starting it."""
        parts = await self._started()
        rendered = await self._rendered(prompt, parts)
        adapter = await parts.adapters.number_of(self, lora_request)
        options: dict[str, Any] = {"priority": priority, "cache_salt": salt_of(prompt, cache_salt), "tenant": tenant}
        return parts.embeddings.prepare(rendered, pooling_params, task, adapter=adapter, **options)

    @property
    def class_labels(self) -> ClassLabels:
        """What the model says of whole texts."""
        return self._class_labels

    async def classify(
        self,
        prompt: Prompt | RenderedPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
    ) -> ClassificationRequestOutput:
        """The probabilities of labels of a prompt."""
        return classification(await self.embed(prompt, pooling_params, request_id, task=CLASSIFY))

    async def score(
        self, text_1: str, text_2: str, pooling_params: PoolingParams | None = None
    ) -> ScoringRequestOutput:
        """How well two texts go together: what a model says that reads both, or the cosine of their vectors."""
        self.class_labels.check(SCORE)
        if self.class_labels.scores_pairs:
            pair = await self.render_pair(text_1, text_2)
            return scoring([await self.embed(pair, pooling_params, task=SCORE)])
        vectors = await asyncio.gather(*(self.embed(text, pooling_params) for text in (text_1, text_2)))
        return scoring(vectors)

    async def render_pair(self, first: str, second: str) -> RenderedPrompt:
        """`Renderer.render_pair` beside the event loop."""
        render = partial(self.renderer.render_pair, first, second, max_tokens=self.ready.max_model_len)
        return await self._text_threads.call(render)

    async def run_jobs(self, jobs: Sequence[Job[_T]], on_end: Callable[[Job[_T]], None]) -> list[_T]:
        """Prepared requests, run together to their ends; `on_end` hears of each. One that fails does not end others."""
        return await run_jobs(self._running, jobs, on_end)

    async def abort(self, request_id: str) -> None:
        """Ends all requests that bear this label; their streams close with finish reason "abort"."""
        self._labels.abort(request_id)

    # ------------------------------------------------------------------------------------------ keeping

    async def pin_prefix(
        self, prompt: Prompt | Sequence[Mapping[str, Any]], name: str | None = None, *, cache_salt: str | None = None
    ) -> PinnedPrefix:
        """Computes the beginning of later prompts once and keeps it for good; see LLM.pin_prefix."""
        prefixes = (await self._started()).prefixes
        token_ids = await self.in_text_thread(prefixes.token_ids_of, prompt)
        return await prefixes.pin(self, token_ids, name, checked_cache_salt(cache_salt))

    async def unpin_prefix(self, name: str) -> None:
        await (await self._started()).prefixes.unpin(self, name)

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> Adapter:
        """Loads an adapter (LoRA) while requests go on; see LLM.load_adapter."""
        return await (await self._started()).adapters.load(self, name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> Adapter:
        """New requests do not find it; those that run go on."""
        return await (await self._started()).adapters.unload(self, name)

    async def adapters(self) -> list[Adapter]:
        """Those that requests may name."""
        return await (await self._started()).adapters.all(self)

    async def find_adapter(self, name: str) -> Adapter | None:
        """The one of this name."""
        return await (await self._started()).adapters.find(self, name)

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """What is pinned, with its size and its use so far."""
        return await (await self._started()).prefixes.all(self)

    async def open_session(
        self, name: str | None = None, *, cache_salt: str | None = None, tenant: Tenancy | None = None
    ) -> AsyncSession:
        """A conversation whose tokens stay in the engine between its turns, until it is closed."""
        parts = await self._started()
        return parts.sessions.open(self, name, checked_cache_salt(cache_salt), tenant)

    async def render_chat(self, chat: Sequence[Mapping[str, Any]], **options: Any) -> RenderedPrompt:
        """`Renderer.render_prompt` beside the event loop; images and videos are fetched from where it is allowed."""
        render = partial(self.renderer.render_prompt, chat, **options)
        sources = self.renderer.media_sources(chat)
        is_long = bool(sources) or self.renderer.has_vectors(chat)
        return await (self._images.call(render, sources) if is_long else self._text_threads.call(render))

    async def hear(self, sound: Any, where: str = "sound", rendering: ImageRendering | None = None) -> Sound:
        """What the model would hear of a sound, of which errors speak as `where`: encoded bytes, samples at 16 kHz, or
        (samples, samples a second). Decoded beside the event loop, of a client one at a time."""
        await self.start()
        sounds = self.renderer.sounds
        if sounds is None:
            raise RequestError(
                f"model: {self.config.served_model_name} does not listen. Take a model that does, such as Whisper.",
                param="model",
            )
        return await (rendering or self._images).call(partial(sounds.hear, sound, where), kind=SOUNDS)

    def open_transcription(self, sound: Sound, params: TranscriptionParams) -> Transcription:
        """Its windows, for whoever runs the requests; RequestError for what the model cannot do."""
        tokens = SpeechTokens.read(self.config.facts)
        assert tokens is not None
        return Transcription(self.renderer, tokens, sound, params, self.ready.max_model_len)

    async def transcribe(self, sound: Any, params: TranscriptionParams | None = None) -> Transcript:
        """A sound of any length as text; see LLM.transcribe."""
        transcription = self.open_transcription(await self.hear(sound), params or TranscriptionParams())
        async for _ in transcription.parts(self.stream):
            pass
        return transcription.transcript

    async def in_text_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Renders or tokenises while the event loop goes on."""
        return await self._text_threads.call(function, *args)

    async def in_form_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Checks a form, which may take seconds, and holds neither the event loop nor texts up."""
        return await self._form_threads.call(function, *args)

    # ------------------------------------------------------------------------------------------ managing

    async def update_weights(self, weights: Mapping[str, Any] | str | Path) -> UpdatedWeights:
        """Other weights while requests go on; see LLM.update_weights."""
        return await (await self._started()).weights.update(self, weights)

    @property
    def weights_version(self) -> str:
        """Of what update_weights has brought; "" for the checkpoint's weights, also after a restart."""
        return self._parts.weights.version if self._parts is not None else ""

    async def memory(self) -> MemoryAccount:
        """Where every slot of the KV cache is; print it."""
        return MemoryAccount.of(await self.control("memory"))

    async def recording(self) -> Recording:
        """What was decided lately and why; see LLM.recording."""
        return await read_recording(self)

    async def statistics(self) -> dict[str, float]:
        """The engine's counters, and the client's."""
        core = await self.control("statistics")
        parts = await self._started()
        grammars = await parts.structured.statistics(self)
        adapters = await parts.adapters.statistics(self)
        # the worker answers between two steps: it is asked only where it has something to say
        experts = await self.control("worker.expert_tokens") if has_experts(self.config.facts.hf_config) else {}
        return {**core, **grammars, **adapters, **experts, **self.client_statistics()}

    @property
    def num_image_bytes(self) -> int:
        """Of the images of all requests in flight."""
        return self._client.num_image_bytes if self._client is not None else 0

    def client_statistics(self) -> dict[str, float]:
        """The client's alone: the engine is not asked."""
        return self._running.statistics()

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        """A management operation of the engine, such as reset_prefix_cache."""
        await self.start()
        return await self._running.control(name, args)

    async def compute(self, request: EngineRequest) -> RequestOutput:
        """A checked request whose output no client sees, run to its end. Raises what ended it instead."""
        with unhooked():
            return await self._gathered(PreparedRequest(request, None, shows_logprobs=False))

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _running(self) -> AsyncEngineClient:
        """The client, for a request that was prepared; its engine may be gone since."""
        if self._client is None:
            raise self._absent()
        return self._client

    def _absent(self) -> EngineDeadError:
        if self.is_asleep:
            return EngineDeadError("The engine sleeps. Call wake_up first.")
        return EngineDeadError("The engine is gone, and another one has not started yet.")

    async def _gathered(self, prepared: PreparedRequest, request_id: str | None = None) -> RequestOutput:
        label = prepared.label(request_id)
        gatherer = OutputGatherer(label, prepared)
        async for delta in self.stream(prepared, request_id=label):
            gatherer.add(delta)
        return gatherer.gathered()

    async def _rendered(self, prompt: Prompt | RenderedPrompt, parts: EngineParts) -> RenderedPrompt:
        """A long text becomes tokens while the event loop goes on."""
        text = text_of(prompt)
        length = parts.maker.limits.max_model_len
        sources = self.renderer.media_sources("", images_of(prompt), videos_of(prompt))
        if sources or are_vectors(prompt):
            return await self._images.call(partial(render, prompt, self.renderer, length), sources)
        if sound_of(prompt) is not None:
            return await self._images.call(partial(render, prompt, self.renderer, length), kind=SOUNDS)
        if text is not None and len(text) > LONG_TEXT:
            return await self._text_threads.call(render, prompt, self.renderer, length)
        return render(prompt, self.renderer, length)

    async def _prepared(
        self,
        prompt: AnyPrompt,
        sampling_params: GenerationParams | None,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        if isinstance(prompt, PreparedRequest):
            if lora_request is not None:
                raise RequestError(
                    "lora_request: given for a request that was prepared or received already. Give it there instead.",
                    param="lora_request",
                )
            return prompt.as_it_is(sampling_params, priority)
        if isinstance(prompt, AsyncIterable):
            return await self.receive(prompt, sampling_params, request_id, priority=priority, lora_request=lora_request)
        return await self.prepare(prompt, sampling_params, priority=priority, lora_request=lora_request)

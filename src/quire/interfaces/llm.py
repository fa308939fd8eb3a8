"""LLM: a batch of prompts in, a list of outputs out (4.2.1, listing 4.1).

    from quire import LLM
    outputs = LLM().generate(["Hello, my name is", "The capital of France is"])

A face of AsyncLLM for callers that block: everything is done by an AsyncLLM on an event loop in a thread of its own.
The core has a thread of this process, or with engine_process=True a process. Any thread may call, also several at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.config import EMBEDDED, EngineConfig
from quire.config.speech_tokens import TRANSCRIBE
from quire.engine_client import AsyncEngineClient, open_link
from quire.errors import RequestError
from quire.hooks import Hook
from quire.interfaces.adapters import Adapter
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.beams import beam_search_output, check_beams
from quire.interfaces.class_labels import CLASSIFY, EMBED, SCORE, checked_task, paired
from quire.interfaces.embeddings import EmbeddingJob, classification, pooled, scoring
from quire.interfaces.hooks.guarded_client import open_client
from quire.interfaces.hooks.judging import Hooks
from quire.interfaces.hooks.loading import hooks_of, names_among
from quire.interfaces.jobs import Job, TextJob
from quire.interfaces.loop_thread import LoopThread, News
from quire.interfaces.memory_account import MemoryAccount
from quire.interfaces.pinned_prefixes import PinnedPrefix
from quire.interfaces.progress import Progress, UseTqdm
from quire.interfaces.prompts import Prompt, as_list, each_of
from quire.interfaces.session import AsyncSession
from quire.interfaces.setup import configured
from quire.interfaces.tokenizer import tokenizer_of
from quire.interfaces.transcription import TranscriptionParams
from quire.interfaces.weights import UpdatedWeights
from quire.lora_request import LoRARequest
from quire.observability.recorded import Recording
from quire.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    Transcript,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import RenderedPrompt, Renderer

Messages = Sequence[Mapping[str, Any]]
_T = TypeVar("_T")


class LLM:
    """An engine for batches. Keywords are the engine's options (docs/options.md)."""

    # outputs tell when their parts were over
    _is_timed = False

    def __init__(self, model: str = EMBEDDED, *, hooks: Sequence[str | Hook] = (), **options: Any) -> None:
        """`hooks`: objects or names of what looks at requests and answers before anybody else (docs/hooks.md)."""
        config = configured({"model": model, "hooks": names_among(hooks), **options})
        # of its own only where that is asked for, also after a sleep
        config = dataclasses.replace(config, engine_process=bool(config.engine_process))
        # The renderer first: a broken tokenizer shows before minutes of loading.
        from quire.renderer import Renderer

        self._open(config, Renderer.from_config(config), hooks)

    def _open(self, config: EngineConfig, renderer: Renderer, hooks: Sequence[str | Hook]) -> None:
        made = hooks_of(config, hooks)
        link = open_link(config, in_own_process=bool(config.engine_process))
        self._start(config, renderer, open_client(link, made), made)

    @classmethod
    def from_parts(
        cls, config: EngineConfig, renderer: Renderer, client: AsyncEngineClient, hooks: Hooks | None = None
    ) -> LLM:
        """An LLM over an engine client that was made elsewhere, with the hooks that it asks; it is closed with the
        LLM."""
        llm = cls.__new__(cls)
        llm._start(config, renderer, client, hooks)
        return llm

    def _start(
        self, config: EngineConfig, renderer: Renderer, client: AsyncEngineClient, hooks: Hooks | None = None
    ) -> None:
        self.config = config
        self.renderer = renderer
        # made when somebody asks for it
        self._tokenizer: Any = None
        self._engine = AsyncLLM.from_config(config, renderer=renderer, client=client, hooks=hooks)
        self._thread = LoopThread()
        # also of an object that nobody uses any more, and at the end of the interpreter
        self._end = weakref.finalize(self, _shut_down, self._engine, self._thread, os.getpid())
        try:
            self._run(self._engine.start())
        except BaseException:
            # nobody gets an LLM to shut down
            self.shutdown()
            raise

    # ------------------------------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in the order of the prompts. A bad prompt raises before anything is started.

        With BeamSearchParams the outputs of a prompt are beams, best first; one call may mix both kinds.
        Lower priorities go first with scheduling_policy=priority; with any policy they are the last to be preempted.
        A sequence that fails while it runs has finish_reason "error" and the reason as its stop_reason; the others go
        on. `lora_request`: the adapter of all prompts, or one for each, None for the model alone.
        """
        given = as_list(prompts)
        each = each_of(sampling_params, len(given), "sampling_params")
        return self._generate(given, each, priority, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt, best first: what `generate` finds with them, in vLLM's shape."""
        check_beams(params)
        given = as_list(prompts)
        each = each_of(params, len(given), "params")
        outputs = self._generate(given, each, priority, use_tqdm, lora_request=lora_request)
        return [beam_search_output(output, one, self.renderer) for output, one in zip(outputs, each, strict=True)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to several: lists of {"role": ..., "content": ...}. Only requests of the same
        cache_salt share the prefix cache. `chat_template`: a file or a text, instead of the model's;
        `continue_final_message`: the last message goes on, with add_generation_prompt=False."""
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "template_kwargs": chat_template_kwargs,
            "max_tokens": self._engine.ready.max_model_len,
        }
        rendered: list[RenderedPrompt] = [
            self._run(self._engine.render_chat(conversation, **options)) for conversation in _conversations(messages)
        ]
        each = each_of(sampling_params, len(rendered), "sampling_params")
        return self._generate(rendered, each, priority, use_tqdm, cache_salt=cache_salt, lora_request=lora_request)

    def transcribe(
        self,
        sounds: Any,
        *,
        language: str | None = None,
        task: str = TRANSCRIBE,
        prompt: str = "",
        temperature: float = 0.0,
        seed: int | None = None,
        timestamps: bool = False,
    ) -> list[Transcript]:
        """What is said in a sound, or in each of a list: encoded bytes, samples at 16 kHz, or (samples, samples a
        second), of up to half an hour. `language`: its code; by default it is found out. `task`: transcribe, or
        translate into English. `prompt`: a text that would stand before. `timestamps`: pieces with their times."""
        params = TranscriptionParams(
            language=language, task=task, prompt=prompt, temperature=temperature, seed=seed, timestamps=timestamps
        )
        return self._run(self._transcribed(sounds if isinstance(sounds, list) else [sounds], params))

    async def _transcribed(self, sounds: list[Any], params: TranscriptionParams) -> list[Transcript]:
        tasks = [asyncio.ensure_future(self._engine.transcribe(sound, params)) for sound in sounds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # the first that fails ends the others
            for task in tasks:
                task.cancel()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector a prompt, in the order of the prompts. A bad prompt raises before anything is started, one that
        fails while it runs when all others are done."""
        return self._pool(as_list(prompts), pooling_params, EMBED, use_tqdm, lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of labels for each prompt, of a model that has a head of labels."""
        outputs = self._pool(as_list(prompts), pooling_params, CLASSIFY, use_tqdm, lora_request)
        return [classification(output) for output in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the head of labels says of each prompt, as it stands: of a reward model the reward."""
        params = msgspec.structs.replace(pooling_params or PoolingParams(), use_activation=False)
        return [pooled(one) for one in self._pool(as_list(prompts), params, CLASSIFY, use_tqdm, lora_request)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """The numbers of each prompt: a vector (embed) or probabilities (classify), by default what the model is
        for."""
        task = checked_task(pooling_task, self._engine.class_labels)
        outputs = self._pool(as_list(prompts), pooling_params, task, use_tqdm, lora_request)
        return [pooled(output) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or pair by pair. A reranker reads both at once; of
        other models it is the cosine of two vectors."""
        labels = self._engine.class_labels
        labels.check(SCORE)
        first, second = ([one] if isinstance(one, str) else list(one) for one in (data_1, data_2))
        pairs = paired(first, second)
        if labels.scores_pairs:
            # the engine reads what it renders: a pair is a prompt that was rendered before
            prompts = [self._run(self._engine.render_pair(*pair)) for pair in pairs]
            return [scoring([one]) for one in self._pool(prompts, pooling_params, SCORE, use_tqdm, lora_request)]
        vectors = self._pool([*first, *second], pooling_params, EMBED, use_tqdm, lora_request)
        return [scoring(pair) for pair in paired(vectors[: len(first)], vectors[len(first) :])]

    def _pool(
        self,
        prompts: Sequence[Any],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        task: str,
        use_tqdm: UseTqdm,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[EmbeddingRequestOutput]:
        each = each_of(pooling_params, len(prompts), "pooling_params")
        adapters = each_of(lora_request, len(prompts), "lora_request")
        return self._run_jobs(self._embedding_jobs(prompts, each, adapters, task), use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without sampling_params: the model's recommendation."""
        return self._engine.get_default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: that of Transformers where it is installed, else ours with encode, decode, get_vocab,
        apply_chat_template and the special tokens by the same names. What the engine itself uses is `renderer`."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.config, self.renderer)
        return self._tokenizer

    # ------------------------------------------------------------------------------------------ keeping

    def pin_prefix(
        self, prompt: Prompt | Messages, name: str | None = None, *, cache_salt: str | None = None
    ) -> PinnedPrefix:
        """Computes the beginning of later prompts once and keeps it for good: a text, token ids or a chat.

        Prompts that begin with its tokens, and are sent with the same cache_salt, use it by themselves.
        """
        return self._run(self._engine.pin_prefix(prompt, name, cache_salt=cache_salt))

    def unpin_prefix(self, name: str) -> None:
        """Its memory may be used for others again."""
        self._run(self._engine.unpin_prefix(name))

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """What is pinned, with its size and its use so far."""
        return self._run(self._engine.pinned_prefixes())

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> Adapter:
        """Loads an adapter (LoRA) from a directory that PEFT has written. `in_place`: a name that is taken gets another
        version, and requests that run go on with the old one."""
        return self._run(self._engine.load_adapter(name, path, in_place=in_place))

    def unload_adapter(self, name: str) -> None:
        """New requests do not find it; those that run go on, and then its memory is given back."""
        self._run(self._engine.unload_adapter(name))

    def adapters(self) -> list[Adapter]:
        """Those that requests may name."""
        return self._run(self._engine.adapters())

    def open_session(self, name: str | None = None, *, cache_salt: str | None = None) -> Session:
        """A conversation whose tokens stay in the engine between its turns, until it is closed."""
        return Session(self._run(self._engine.open_session(name, cache_salt=cache_salt)), self)

    # ------------------------------------------------------------------------------------------ managing

    def update_weights(self, weights: Mapping[str, Any] | str | Path) -> UpdatedWeights:
        """Other weights, in place: tensors by the names of the checkpoint (all of them or some), or a safetensors file.

        Nothing that was computed with the old ones is read again; requests that run keep their tokens and go on. If
        anything is wrong, nothing has changed.
        """
        return self._run(self._engine.update_weights(weights))

    def memory(self) -> MemoryAccount:
        """Where every slot of the KV cache is; print it."""
        return self._run(self._engine.memory())

    def recording(self) -> Recording:
        """What was decided lately and why, step by step; `perfetto` makes a trace of it (docs/observability.md)."""
        return self._run(self._engine.recording())

    def statistics(self) -> dict[str, float]:
        """The engine's counters, and the client's."""
        return self._run(self._engine.statistics())

    def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        """A management operation of the engine, such as reset_prefix_cache."""
        return self._run(self._engine.control(name, dict(args or {})))

    def shutdown(self) -> None:
        """Ends the engine and frees its memory; the object is of no use afterwards."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # ------------------------------------------------------------------------------------------ inside

    def _run(self, work: Coroutine[Any, Any, _T], news: News | None = None) -> _T:
        return self._thread.run(work, news)

    def _generate(
        self,
        prompts: Sequence[Any],
        each: Sequence[GenerationParams | None],
        priority: int | Sequence[int],
        use_tqdm: UseTqdm,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        priorities = each_of(priority, len(prompts), "priority")
        adapters = each_of(lora_request, len(prompts), "lora_request")
        return self._run_jobs(self._text_jobs(prompts, each, priorities, adapters, cache_salt), use_tqdm)

    async def _text_jobs(
        self,
        prompts: Sequence[Any],
        each: Sequence[GenerationParams | None],
        priorities: Sequence[int],
        adapters: Sequence[LoRARequest | None],
        cache_salt: str | None,
    ) -> list[TextJob]:
        jobs: list[TextJob] = []
        for prompt, params, priority, adapter in zip(prompts, each, priorities, adapters, strict=True):
            with _numbered(len(jobs)):
                prepared = await self._engine.prepare(
                    prompt, params, priority=priority, cache_salt=cache_salt, lora_request=adapter
                )
                jobs.append(TextJob(prepared, self.renderer, is_timed=self._is_timed))
        return jobs

    async def _embedding_jobs(
        self,
        prompts: Sequence[Any],
        each: Sequence[PoolingParams | None],
        adapters: Sequence[LoRARequest | None],
        task: str,
    ) -> list[EmbeddingJob]:
        jobs: list[EmbeddingJob] = []
        for prompt, params, adapter in zip(prompts, each, adapters, strict=True):
            with _numbered(len(jobs)):
                prepared = await self._engine.prepare_embedding(prompt, params, lora_request=adapter, task=task)
                jobs.append(EmbeddingJob(prepared))
        return jobs

    def _run_jobs(self, making: Coroutine[Any, Any, Sequence[Job[_T]]], use_tqdm: UseTqdm) -> list[_T]:
        jobs = self._run(making)
        news: News = queue.SimpleQueue()
        with Progress(len(jobs), use_tqdm) as progress:

            def on_end(job: Job[_T]) -> None:
                # told in the caller's thread, where a notebook draws its bars
                news.put(partial(progress.finish_one, len(job.request.prompt_token_ids), job.num_output_tokens))

            return self._run(self._engine.run_jobs(jobs, on_end), news)


def _shut_down(engine: AsyncLLM, thread: LoopThread, owner: int) -> None:
    # a fork has the engine, but none of its threads
    if os.getpid() == owner:
        thread.close(engine.shutdown)


class Session:
    """A conversation of an LLM. One turn at a time; closing it gives its memory back."""

    def __init__(self, session: AsyncSession, llm: LLM) -> None:
        self._session = session
        # also keeps it: an LLM that nobody holds is shut down
        self._llm = llm

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def token_ids(self) -> list[int]:
        """Everything so far: prompts and outputs."""
        return self._session.token_ids

    @property
    def num_tokens(self) -> int:
        return self._session.num_tokens

    def generate(
        self,
        prompt: Prompt | RenderedPrompt,
        sampling_params: GenerationParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """One turn: the prompt is appended to what is kept, and so is the output, or the first of several. A failed
        turn changes nothing."""
        return self._llm._run(self._session.generate(prompt, sampling_params, lora_request=lora_request))

    def fork(self, name: str | None = None) -> Session:
        """A second session with the same past, from where each goes its own way."""
        return Session(self._llm._run(self._session.fork(name)), self._llm)

    def rewind(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        self._llm._run(self._session.rewind(num_tokens))

    def close(self) -> None:
        """Ends a turn of another thread and gives its memory back. May be called twice, and after the engine's end."""
        if not self._llm._thread.is_closed:
            self._llm._run(self._session.close())

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._llm._thread.is_closed:
            self._llm._run(self._session.__aexit__(kind, error, trace))


@contextmanager
def _numbered(position: int) -> Iterator[None]:
    """Says of a bad prompt which one it is."""
    try:
        yield
    except RequestError as error:
        error.add_note(f"It is prompt number {position} of this call, counted from 0. Nothing was started.")
        raise


def _conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    if isinstance(messages, list | tuple) and messages:
        first = messages[0]
        if isinstance(first, Mapping):
            return [messages]
        if isinstance(first, list | tuple):
            return messages
    raise RequestError(
        'messages: must be a list of {"role": ..., "content": ...}, or a list of such lists.', param="messages"
    )

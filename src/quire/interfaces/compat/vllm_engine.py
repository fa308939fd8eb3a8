"""vLLM's Python classes on ours: a program written for it runs with its import changed (`import quire.vllm as vllm`).

What is here translates names and forms; nothing of the engine is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypedDict, TypeVar

import msgspec

import quire.interfaces.llm as our
from quire.beam_search_params import GenerationParams
from quire.config import EMBEDDED, EngineConfig
from quire.errors import OptionError, RequestError
from quire.interfaces import async_llm
from quire.interfaces.compat.vllm_logits import Processors, VllmConfig
from quire.interfaces.compat.vllm_names import options_from_vllm
from quire.interfaces.compat.vllm_outputs import FlatLogprobs
from quire.interfaces.compat.vllm_params import RequestOutputKind
from quire.interfaces.loop_thread import News
from quire.interfaces.progress import UseTqdm
from quire.lora_request import LoRARequest
from quire.observability.perfetto import perfetto_trace
from quire.observability.recorded import Recording
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.sampling_params import SamplingParams

logger = logging.getLogger("quire.vllm")

_T = TypeVar("_T")


class TextPrompt(TypedDict, total=False):
    """A prompt that is a text."""

    prompt: str
    multi_modal_data: Mapping[str, Any]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt that is tokens."""

    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt that is vectors, [tokens, width]."""

    prompt_embeds: Any
    cache_salt: str


PromptType: TypeAlias = "str | TextPrompt | TokensPrompt | EmbedsPrompt | Sequence[int]"


def our_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of vLLM as ours; what changes nothing is said once."""
    translated, unused = options_from_vllm(options)
    if line := unused.line():
        logger.warning("%s", line)
    return translated


class EngineArgs:
    """Options of an engine that is not made yet."""

    def __init__(self, model: str = EMBEDDED, **options: Any) -> None:
        self.options = {"model": model, **options}

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        return cls(**{name: value for name, value in vars(args).items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AttributeError(name) from None


class LLM(our.LLM):
    """Ours, with vLLM's options, positions of arguments and names."""

    def __init__(self, model: str = EMBEDDED, **options: Any) -> None:
        self._forms, options = _forms_of(options)
        self._profile = _Profile(options.pop("profiler_config", None))
        self._is_timed = options.get("disable_log_stats") is False
        self._processors = Processors(options.pop("logits_processors", None), options)
        super().__init__(**our_options({"model": model, **options}))

    @property
    def model_config(self) -> ModelConfig:
        """Facts of the model."""
        return ModelConfig(self.config, self._engine.ready.max_model_len)

    def _generate(
        self,
        prompts: Sequence[Any],
        each: Sequence[GenerationParams | None],
        priority: int | Sequence[int],
        use_tqdm: UseTqdm,
        **options: Any,
    ) -> list[RequestOutput]:
        formed = [self.prepared(one) for one in each]
        outputs = super()._generate(prompts, formed, priority, use_tqdm, **options)
        for output, params in zip(outputs, each, strict=True):
            if getattr(params, "is_flat", False):
                _flatten(output)
        return outputs

    def prepared(self, params: GenerationParams | None) -> Any:
        """With what was said of all requests: how forms are written, and processors."""
        if params is None and self._processors:
            params = self.get_default_sampling_params()
        return self._processors.of(_with_forms(params, self._forms), lambda: self.vllm_config)

    @property
    def vllm_config(self) -> VllmConfig:
        """What a processor may ask of the engine."""
        return VllmConfig.of(self.config, self.model_config)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**engine_args.options)

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        given = self._tokenized(prompts, tokenization_kwargs) if tokenization_kwargs else prompts
        return super().generate(
            given, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=_priority(priority)
        )

    def beam_search(self, prompts: Any, params: Any, **options: Any) -> list[BeamSearchOutput]:
        """The token that ends a text is not among its tokens, as in vLLM."""
        given = [_with_forms(one, self._forms) for one in params] if isinstance(params, list | tuple) else params
        outputs = super().beam_search(prompts, _with_forms(given, self._forms), **options)
        for beam in (one for output in outputs for one in output.sequences):
            if beam.finish_reason == "stop" and beam.tokens[-1] in self.renderer.eos_token_ids:
                del beam.tokens[-1]
        return outputs

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        *,
        priority: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        return super().chat(
            messages,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            chat_template=chat_template,
            priority=_priority(priority),
            **options,
        )

    def _tokenized(self, prompts: Any, options: Mapping[str, Any]) -> Any:
        """Texts as tokens, as somebody wants them made."""
        unknown = options.keys() - {"add_special_tokens", "truncate_prompt_tokens"}
        if unknown:
            raise RequestError(
                f"tokenization_kwargs: {', '.join(sorted(unknown))}: only add_special_tokens and "
                "truncate_prompt_tokens are taken. Tokenise the prompt yourself, and give prompt_token_ids.",
                param="tokenization_kwargs",
            )
        if isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int)):
            return [self._tokenized(one, options) for one in prompts]
        text = prompts.get("prompt") if isinstance(prompts, Mapping) else prompts
        if not isinstance(text, str):
            return prompts
        token_ids = self.renderer.encode(text, add_special_tokens=options.get("add_special_tokens", True))
        length = options.get("truncate_prompt_tokens")
        if length == -1:
            length = self._engine.ready.max_model_len
        if length is not None and (type(length) is not int or length < 1):
            raise RequestError(
                f"tokenization_kwargs: truncate_prompt_tokens={length!r}: must be at least 1, or -1 for as many as the "
                "model takes.",
                param="tokenization_kwargs",
            )
        beside = {name: value for name, value in prompts.items() if name != "prompt"} if text is not prompts else {}
        return {**beside, "prompt_token_ids": token_ids if length is None else token_ids[-length:]}

    @property
    def llm_engine(self) -> LLMEngine:
        """The same engine, driven step by step."""
        return LLMEngine(self)

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        """Nothing that was computed before is read again."""
        return bool(self.control("reset_prefix_cache"))

    def get_metrics(self) -> list[Metric]:
        """The engine's counters as objects with name and value."""
        kinds = {True: Counter, False: Gauge}
        return [kinds[name.endswith("_total")](name, value) for name, value in sorted(self.statistics().items())]

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """From here on; `stop_profile` writes it down."""
        self._profile.start(profile_prefix)

    def stop_profile(self) -> None:
        """Writes a trace of what the engine did lately, which ui.perfetto.dev opens."""
        self._profile.stop(self.recording)

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> NoReturn:
        raise OptionError(f"collective_rpc: {method}: workers take no calls. LLM.update_weights exchanges weights.")

    apply_model = collective_rpc

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Weights and KV cache leave memory."""
        if level == 1 and self._engine.weights_version:
            raise OptionError(
                "sleep: level=1: those of the model's files come back, and update_weights has changed them. Give "
                "level=2, and update them again after wake_up."
            )
        if not self._engine.is_asleep:
            super()._run(self._engine.sleep())

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """The engine as it was made, from the model's files; whatever `tags` name."""
        super()._run(self._engine.wake_up())

    def _run(self, work: Coroutine[Any, Any, _T], news: News | None = None) -> _T:
        if self._engine.is_asleep:
            work.close()
            raise OptionError("the engine sleeps. Call wake_up first.")
        return super()._run(work, news)


class AsyncLLM(async_llm.AsyncLLM):
    """Ours, with vLLM's options."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> AsyncLLM:
        return cls(**our_options(engine_args.options))

    def generate(
        self, prompt: Any, sampling_params: Any = None, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        kind = getattr(sampling_params, "kind", None)
        is_delta = kind == RequestOutputKind.DELTA
        outputs = super().generate(prompt, sampling_params, request_id, **{"delta": is_delta, **options})
        return _last_of(outputs) if kind == RequestOutputKind.FINAL_ONLY else outputs


async def _last_of(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
    async for output in outputs:
        if output.finished:
            yield output


_OF_FORMS = ("disable_any_whitespace", "disable_additional_properties")


def _forms_of(options: Mapping[str, Any]) -> tuple[dict[str, bool], dict[str, Any]]:
    """What structured_outputs_config says of all forms, and the options without it."""
    config = options.get("structured_outputs_config")
    if not isinstance(config, Mapping):
        return {}, dict(options)
    forms = {name: True for name in _OF_FORMS if config.get(name)}
    rest = {name: value for name, value in config.items() if name not in _OF_FORMS}
    return forms, {**options, "structured_outputs_config": rest}


def _with_forms(params: Any, forms: Mapping[str, bool]) -> Any:
    asked = getattr(params, "structured_outputs", None)
    if not forms or asked is None or asked.whitespace_pattern is not None:
        return params
    return msgspec.structs.replace(params, structured_outputs=msgspec.structs.replace(asked, **forms))


def _flatten(output: RequestOutput) -> None:
    whole: Any = output
    if output.prompt_logprobs is not None:
        whole.prompt_logprobs = FlatLogprobs(output.prompt_logprobs)
    for one in whole.outputs:
        if one.logprobs is not None:
            one.logprobs = FlatLogprobs(one.logprobs)


class ModelConfig:
    """Facts of a model by vLLM's names."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self.model = config.facts.path
        self.tokenizer = config.tokenizer_path
        self.served_model_name = config.served_model_name
        self.max_model_len = max_model_len
        self.dtype = config.worker.dtype
        self.hf_config = config.facts.hf_config
        self.embedding_size: int = config.facts.hf_config["hidden_size"]
        self._vocab_size: int = config.facts.vocab_size

    def get_vocab_size(self) -> int:
        return self._vocab_size

    def get_hidden_size(self) -> int:
        return self.embedding_size


class _Profile:
    """A trace between two calls, in the folder that profiler_config or the environment names."""

    def __init__(self, config: Any) -> None:
        given = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
        default = os.environ.get("VLLM_TORCH_PROFILER_DIR", "vllm_profile")
        self._folder = Path(given.get("torch_profiler_dir") or default)
        self._name: str | None = None
        self._num_written = 0

    def start(self, prefix: str | None) -> None:
        self._name = prefix or "quire"

    def stop(self, recording: Callable[[], Recording]) -> None:
        if self._name is None:
            raise OptionError("stop_profile: nothing was started. Call start_profile first.")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._num_written += 1
        path = self._folder / f"{self._name}-{os.getpid()}-{self._num_written}.json"
        path.write_text(json.dumps(perfetto_trace(recording())), encoding="utf-8")
        self._name = None
        logger.info("%s: what the engine did lately, for ui.perfetto.dev", path)


def _priority(given: int | Sequence[int] | None) -> int | Sequence[int]:
    return 0 if given is None else given


class Metric:
    """A counter and its value."""

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"Metric(name={self.name!r}, value={self.value!r})"


class Counter(Metric):
    """It only grows."""


class Gauge(Metric):
    """As it is now."""


class Histogram(Metric):
    """Of several buckets: only /metrics has them."""


class Vector(Metric):
    """Of several values: only /metrics has them."""


def cleanup_dist_env_and_memory(*_: Any, **__: Any) -> None:
    """For programs that call it: an engine gives everything back when it is shut down."""


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """The first numbers, and how many there are."""
    print(f"{prefix}: {list(embeds[:4])}, {len(embeds)} numbers")


class LLMEngine:
    """Requests are added one by one, and `step` gives what has ended since. The engine goes on by itself between."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._running: dict[str, Future[RequestOutput]] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        return cls(LLM.from_engine_args(engine_args))

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0, lora_request: Any = None
    ) -> str:
        params = self.llm.prepared(params)

        async def answer() -> RequestOutput:
            async for output in self.llm._engine.generate(
                prompt, params, request_id, priority=priority, lora_request=lora_request
            ):
                last = output
            return last

        self._running[request_id] = self.llm._thread.begin(answer())
        self._running[request_id].add_done_callback(lambda _: self._ended.put(request_id))
        return request_id

    def step(self) -> list[RequestOutput]:
        """Waits until a request has ended."""
        if not self._running:
            return []
        names = [self._ended.get()]
        while not self._ended.empty():
            names.append(self._ended.get())
        ended = {name: one for name in names if (one := self._running.get(name)) is not None}
        whole = [name for name, one in ended.items() if not one.cancelled() and one.exception() is None]
        # an error is raised in a step of its own, so that what others have is not lost with it
        taken = whole or list(ended)[:1]
        for name in ended:
            if name not in taken:
                self._ended.put(name)
        return [self._running.pop(name).result() for name in taken]

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if request_id in self._running:
                self._running.pop(request_id).cancel()

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return self.llm._engine.num_open_requests

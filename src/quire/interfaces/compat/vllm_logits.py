"""vLLM's classes that change the logits of a batch, on our processors of a row: each sequence is a batch of one.

A class is made for every sequence, told that it was added at place 0, and given its logits as a batch. So it sees what
it would see in vLLM, but for the other sequences of the batch, about which it must not ask.
"""

from __future__ import annotations

import copy
import enum
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from quire.config import EngineConfig
from quire.errors import OptionError, RequestError, one_line
from quire.interfaces.compat.vllm_params import NOBODYS_ARGS, ExtraArgs, SamplingParams
from quire.sampling_params import SamplingParams as OurSamplingParams

_T = TypeVar("_T")
# of the output and logits, or of the prompt, the output and logits of one sequence
RequestLogitsProcessor: TypeAlias = Callable[..., Any]


class MoveDirectionality(enum.Enum):
    """How two places of a batch change. Here nothing ever moves."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What changed since the last step: removed, then added, then moved."""

    batch_size: int
    removed: Sequence[int]
    # place, parameters, prompt, and the output, a list that grows
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor:
    """Changes the logits of a batch, [sequences, vocabulary]."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """A ValueError refuses a request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """`vllm_config`: a VllmConfig."""

    def apply(self, logits: Any) -> Any:
        """In place, or others."""
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        """Asked by vLLM, which leaves those out where the greatest is taken. Here all are applied."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each step; None where no sequence came or went."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """A function for each sequence that wants one."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """None: the sequence has none."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._state_of)

    def _state_of(self, params: Any, prompt: list[int] | None, output: list[int]) -> Callable[[Any], Any] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        return partial(function, prompt, output) if takes_prompt else partial(function, output)

    def apply(self, logits: Any) -> Any:
        for place, function in self.req_info.items():
            logits[place] = function(logits[place])
        return logits


def process_dict_updates(
    req_entries: dict[int, _T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[Any, list[int] | None, list[int]], _T | None],
) -> bool:
    """Keeps states by place of the batch; whether any changed. None: a sequence has no state."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for place in batch_update.removed:
        req_entries.pop(place, None)
    for place, params, prompt, output in batch_update.added:
        _put(req_entries, place, new_state(params, prompt, output))
    for first, second, direction in batch_update.moved:
        moved = req_entries.pop(first, None)
        if direction is MoveDirectionality.SWAP:
            _put(req_entries, first, req_entries.get(second))
        _put(req_entries, second, moved)
    # by identity: states may be tensors, which have no one answer to whether they are equal
    is_same = req_entries.keys() == before.keys() and all(req_entries[place] is before[place] for place in before)
    return not is_same


def _put(entries: dict[int, _T], place: int, state: _T | None) -> None:
    if state is None:
        entries.pop(place, None)
    else:
        entries[place] = state


@dataclass(frozen=True)
class SchedulerConfig:
    """The bounds of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class VllmConfig:
    """What a processor may ask of the engine."""

    model_config: Any
    scheduler_config: SchedulerConfig
    # never beside processors of vLLM's
    speculative_config: None = None

    @classmethod
    def of(cls, config: EngineConfig, model_config: Any) -> VllmConfig:
        return cls(model_config, SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens))


class OfOneSequence:
    """A class of vLLM's as a function of ours."""

    def __init__(self, made: type[LogitsProcessor], config: VllmConfig, params: Any) -> None:
        self.__name__ = made.__name__
        self._made = made
        self._config = config
        self._params = params
        self._processor: LogitsProcessor | None = None
        self._output: list[int] = []

    def clone(self) -> OfOneSequence:
        """For a further output of the same prompt."""
        return OfOneSequence(self._made, self._config, self._params)

    def __call__(self, prompt: list[int], output: list[int], logits_V: Any) -> Any:
        self._output[:] = output
        update = None
        if self._processor is None:
            self._processor = self._made(self._config, logits_V.device, False)
            update = BatchUpdate(1, (), [(0, self._params, prompt, self._output)], ())
        self._processor.update_state(update)
        return self._processor.apply(logits_V[None])[0]


class Processors:
    """Those of an engine, for every request."""

    def __init__(self, wanted: Any, options: dict[str, Any]) -> None:
        self._classes = [_class_of(processor) for processor in wanted or ()]
        if self._classes and options.get("speculative_config"):
            raise OptionError(
                "logits_processors: classes of vLLM's cannot judge drafts. Leave speculative_config or these out."
            )

    def __bool__(self) -> bool:
        return bool(self._classes)

    def of(self, params: Any, config_of: Callable[[], VllmConfig]) -> Any:
        """The parameters of a request, with its processors."""
        asked = getattr(params, "logits_processors", None) or []
        extra = next((one.args for one in asked if isinstance(one, ExtraArgs)), None)
        if not self._classes and extra is not None:
            raise RequestError(NOBODYS_ARGS, param="extra_args")
        if not self._classes:
            return params
        if not isinstance(params, OurSamplingParams):
            raise RequestError("beam search: classes of LLM(logits_processors=[...]) take no part in it.")
        is_theirs = isinstance(params, SamplingParams)
        shown: Any = copy.copy(params) if is_theirs else SamplingParams(**msgspec.structs.asdict(params))
        shown.extra_args = extra
        config = config_of()
        own = [one for one in asked if not isinstance(one, ExtraArgs)]
        for made in self._classes:
            try:
                made.validate_params(shown)
            except Exception as error:
                # a ValueError speaks to whoever asked; anything else is a fault of the class
                kind = "" if isinstance(error, ValueError) else f"validate_params raised {type(error).__name__}: "
                raise RequestError(f"{made.__name__}: {kind}{one_line(error)}", param="extra_args") from None
            own.append(OfOneSequence(made, config, shown))
        return msgspec.structs.replace(params, logits_processors=own)


def _class_of(wanted: Any) -> type[LogitsProcessor]:
    """A class, or where it is: module:Class."""
    processor_class = wanted
    if isinstance(wanted, str):
        module, _, name = wanted.partition(":")
        try:
            processor_class = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise OptionError(f"logits_processors={wanted}: must be module:Class ({error}).") from None
    if not (isinstance(processor_class, type) and issubclass(processor_class, LogitsProcessor)):
        raise OptionError(f"logits_processors={wanted!r}: must be a class made of vllm's LogitsProcessor.")
    return processor_class

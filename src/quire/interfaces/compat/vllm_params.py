"""Sampling parameters that only vLLM has: what they say is as it is here, or is refused with the reason."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

from quire.errors import RequestError
from quire.sampling_params import SamplingParams as OurSamplingParams


class RequestOutputKind(enum.Enum):
    """What AsyncLLM.generate yields. LLM gives whole outputs, whatever it says."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# parameter -> values that ask for nothing, and what to do for the others
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "spaces_between_special_tokens": ((True,), "special tokens are written as the tokenizer writes them"),
    "skip_clone": ((False, True), ""),
    "truncate_prompt_tokens": ((None,), "cut the prompt, or give tokenization_kwargs to generate"),
    "skip_reading_prefix_cache": ((None, False), "give the prompt a cache_salt of its own"),
}


class ExtraArgs:
    """extra_args, among the processors of a request until an engine takes them for its own classes (vllm_logits.py)."""

    __name__ = "extra_args"

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def __call__(self, _output: list[int], _logits: Any) -> None:
        raise RequestError(NOBODYS_ARGS)


NOBODYS_ARGS = (
    "extra_args: are for classes of vllm.LLM(logits_processors=[...]), and there are none. Give "
    'logits_processors=[{"name": ..., "args": {...}}] in the parameters.'
)


class SamplingParams(OurSamplingParams, kw_only=True, dict=True):
    """Ours, and vLLM's further names, none of which is sent to the engine."""

    # what output_kind and flat_logprobs said
    kind: ClassVar[RequestOutputKind | None] = None
    is_flat: ClassVar[bool] = False
    output_kind: RequestOutputKind | None = None
    extra_args: dict[str, Any] | None = None
    flat_logprobs: bool = False
    spaces_between_special_tokens: bool = True
    skip_clone: bool = False
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        for name, (neutral, instead) in REFUSED.items():
            if getattr(self, name) not in neutral:
                raise RequestError(f"{name}={getattr(self, name)!r}: not supported: {instead}.", param=name)
        if self.extra_args:
            self.logits_processors = [*(self.logits_processors or ()), ExtraArgs(self.extra_args)]
            self.extra_args = None
        super().__post_init__()
        self.__dict__["kind"] = self.output_kind
        self.__dict__["is_flat"] = self.flat_logprobs
        self.output_kind = None
        self.flat_logprobs = False
        self.extra_args = None
        self.skip_clone = False
        self.skip_reading_prefix_cache = None

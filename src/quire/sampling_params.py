"""What a user may ask of one request's output. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from quire.errors import RequestError
from quire.logits_processors import check_processors
from quire.parameter_checks import (
    Bounds,
    Suggesting,
    check_bounds,
    check_encodable,
    check_flags,
    check_token_ids,
    is_int,
    is_number,
    list_of,
    make_plain,
)
from quire.structured_outputs_params import StructuredOutputsParams

MAX_N = 128
MAX_STOP_STRINGS = 16
_MOST_CHARACTERS = 1024
BOUNDS: tuple[Bounds, ...] = (
    ("n", 1, MAX_N),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("thinking_token_budget", 0, 2**31 - 1),
    # up to a whole vocabulary; the engine's option max_logprobs says how many may be asked for
    ("logprobs", -1, 2**20),
    ("prompt_logprobs", -1, 2**20),
    ("seed", -(2**63), 2**64 - 1),
)
_OPTIONAL = ("max_tokens", "thinking_token_budget", "logprobs", "prompt_logprobs", "seed")
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


class SamplingParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=Suggesting
):
    """Sampling and stopping of one request.

    `temperature=0` is greedy. `top_k` of 0 or -1 means all tokens. `max_tokens=None` means up to the model's length.
    `logprobs=k` returns the chosen token's log-probability and those of the k best, -1 of all; `logprob_token_ids` has
    those of these tokens in place of the best. `structured_outputs` constrains the form of the output: to a JSON
    schema, a regular expression, a choice or a grammar. `thinking_token_budget`: after so many tokens of thoughts the
    model is made to end them; where a form is asked for there are none.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "best_of": "Give n, ask for logprobs, and take the output with the greatest cumulative_logprob.",
        "use_beam_search": "Give BeamSearchParams(beam_width=4) in place of SamplingParams.",
        "cache_salt": 'It belongs to the prompt: {"prompt": text, "cache_salt": salt}.',
    }

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_words: list[str] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    thinking_token_budget: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    # functions, names, or {"name": ..., "args": {...}} (quire/logits_processors.py)
    logits_processors: list[Any] | None = None
    # None: as the engine is told by watermark_config, where text is drawn
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        self.stop = list_of("stop", self.stop, is_text=True)
        self.bad_words = list_of("bad_words", self.bad_words, is_text=True)
        self.stop_token_ids = list_of("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list_of("allowed_token_ids", self.allowed_token_ids)
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = list_of("logprob_token_ids", self.logprob_token_ids)
            self.logprobs = 0
        check_bounds(self, BOUNDS, optional=_OPTIONAL)
        check_flags(self, _FLAGS)
        self._check_open_ranges()
        self._check_lists()
        self._check_structured_outputs()
        self._check_watermarking()
        if self.logits_processors is not None:
            check_processors(self.logits_processors)
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    def _check_watermarking(self) -> None:
        if self.watermarking not in (None, True, False):
            raise RequestError(f"watermarking={self.watermarking!r}: must be true or false.", param="watermarking")
        if self.watermarking and self.is_greedy:
            raise RequestError(
                "watermarking: not with temperature=0, which leaves nothing to choose. Raise it, or leave it out.",
                param="watermarking",
            )

    def _check_open_ranges(self) -> None:
        if not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p!r}: must be above 0 and at most 1.", param="top_p")
        if not is_number(self.repetition_penalty) or not 0.0 < self.repetition_penalty <= 100.0:
            raise RequestError(
                f"repetition_penalty={self.repetition_penalty!r}: must be above 0 and at most 100.",
                param="repetition_penalty",
            )

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed.", param="stop")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name}={getattr(self, name)!r}: must be non-empty strings.", param=name)
                if len(text) > _MOST_CHARACTERS:
                    raise RequestError(
                        f"{name}: a string of {len(text)} characters, at most {_MOST_CHARACTERS} are allowed.",
                        param=name,
                    )
                check_encodable(name, text)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if token_ids := getattr(self, name):
                check_token_ids(name, token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids=[]: leaves nothing to generate. Leave it out.", param="allowed_token_ids"
            )
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise RequestError(
                f"logit_bias={self.logit_bias!r}: must be a dictionary from token ids to numbers.", param="logit_bias"
            )
        for token, bias in (self.logit_bias or {}).items():
            if not is_int(token) or not is_number(bias) or not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias[{token!r}]={bias!r}: keys are token ids, values lie between -100 and 100.",
                    param="logit_bias",
                )

    def _check_structured_outputs(self) -> None:
        asked: Any = self.structured_outputs
        if isinstance(asked, dict):
            asked = self.structured_outputs = StructuredOutputsParams(**asked)
        if asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs={asked!r}: must be StructuredOutputsParams.", param="structured_outputs"
            )
        if asked is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos: not together with structured_outputs: where the form is complete, nothing but the end may "
                "follow. Leave one of them out.",
                param="ignore_eos",
            )

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}.", param="min_tokens"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True: stop strings are looked for in the text.", param="stop")

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        SamplingParams.check_names(changes)
        return msgspec.structs.replace(self, **changes)

"""What a user may ask of beam search. Names are vLLM's and Transformers'; definitions are Transformers'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from quire.errors import RequestError
from quire.messages import DecodingSpec
from quire.parameter_checks import Bounds, Suggesting, check_bounds, check_flags, check_token_ids, list_of, make_plain
from quire.sampling_params import MAX_N, SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams

_BOUNDS: tuple[Bounds, ...] = (
    ("beam_width", 1, MAX_N),
    ("max_tokens", 1, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    # wider ones would only overflow: a length is raised to this power
    ("length_penalty", -10.0, 10.0),
    ("logprobs", 0, 1024),
    ("num_return_sequences", 1, MAX_N),
    ("num_beam_groups", 1, MAX_N),
    ("diversity_penalty", 0.0, 50.0),
)
_OPTIONAL = ("max_tokens", "logprobs", "num_return_sequences")
_FLAGS = ("ignore_eos", "skip_special_tokens", "do_sample")
# with the meaning and the bounds that SamplingParams give them
_AS_IN_SAMPLING = (
    "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_p", "top_k", "seed",
    "stop_token_ids", "ignore_eos", "max_tokens", "skip_special_tokens", "structured_outputs",
)  # fmt: skip


class BeamSearchParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=Suggesting
):
    """Beam search of one request: the `beam_width` most probable continuations are followed.

    A continuation's score is its cumulative log-probability divided by its length to the power of `length_penalty`; the
    tokens that it was given count, its end token too. `early_stopping`: True ends the search when as many continuations
    as beams are complete, False when no beam can be expected to become better, "never" when none can. `temperature` of
    0 or 1 takes the model's own probabilities, others those of logits / temperature. Penalties act on
    log-probabilities, which are not normalised again; `top_p` and `top_k` say which continuations of a beam count. With
    `do_sample` continuations are drawn, in proportion to the probability of the whole beam and without replacement: the
    same `seed` draws the same. `num_return_sequences=None` returns all beams. With
    `num_beam_groups` above 1 the groups search one after the other, and a token that an earlier group has chosen in the
    same step costs `diversity_penalty` (diverse beam search). `max_tokens=None` means up to the model's length. Beams
    follow `structured_outputs`; a form that has fewer continuations than there are beams has fewer outputs.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "n": "All beams are returned; num_return_sequences asks for fewer.",
        "num_beams": "Its name is beam_width.",
        "stop": "Beams end at tokens: give stop_token_ids.",
        "cache_salt": 'It belongs to the prompt: {"prompt": text, "cache_salt": salt}.',
    }

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: int | None = None
    num_return_sequences: int | None = None
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    do_sample: bool = False
    seed: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        self.stop_token_ids = list_of("stop_token_ids", self.stop_token_ids)
        check_token_ids("stop_token_ids", self.stop_token_ids)
        check_bounds(self, _BOUNDS, optional=_OPTIONAL)
        check_flags(self, _FLAGS)
        stopping = self.early_stopping
        if not isinstance(stopping, bool) and not (isinstance(stopping, str) and stopping == "never"):
            raise RequestError(
                f'early_stopping={self.early_stopping!r}: must be True, False or "never".', param="early_stopping"
            )
        self._check_num_outputs()
        self._check_groups()
        # their bounds are checked there
        self.structured_outputs = self.sampling_params().structured_outputs

    def _check_num_outputs(self) -> None:
        if self.n > self.beam_width:
            raise RequestError(
                f"num_return_sequences={self.n}: at most beam_width={self.beam_width} are found. Raise beam_width.",
                param="num_return_sequences",
            )

    def _check_groups(self) -> None:
        width = self.beam_width
        groups = self.num_beam_groups
        penalty = self.diversity_penalty
        if width % groups:
            raise RequestError(
                f"num_beam_groups={groups}: must divide beam_width={width}, because all groups have the same number of "
                f"beams. Take {_nearest_divisor(width, groups)}, or another width.",
                param="num_beam_groups",
            )
        if groups > 1 and not penalty:
            raise RequestError(
                f"num_beam_groups={groups}: without a diversity_penalty all groups would find the same. Set one above "
                "0, or leave num_beam_groups out.",
                param="num_beam_groups",
            )
        if groups == 1 and penalty:
            raise RequestError(
                f"diversity_penalty={penalty}: it sets groups of beams apart, and there is one. Raise num_beam_groups, "
                "or leave the penalty out.",
                param="diversity_penalty",
            )

    @property
    def n(self) -> int:
        """Outputs of the request, by the name that SamplingParams gives them."""
        return self.beam_width if self.num_return_sequences is None else self.num_return_sequences

    def sampling_params(self) -> SamplingParams:
        """The part that the engine core reads as it does of any request."""
        return SamplingParams(
            n=self.n,
            # Always: the sum over the chosen tokens is what a beam is judged by.
            logprobs=self.logprobs or 0,
            **{name: getattr(self, name) for name in _AS_IN_SAMPLING},
        )

    def decoding_spec(self) -> DecodingSpec:
        """The method of the engine core that chooses the tokens."""
        args: dict[str, Any] = {
            "width": self.beam_width,
            "length_penalty": float(self.length_penalty),
            "early_stopping": self.early_stopping,
            **({"do_sample": True} if self.do_sample else {}),
        }
        if self.num_beam_groups == 1:
            return DecodingSpec(method="beam_search", args=args)
        groups = {"num_groups": self.num_beam_groups, "diversity_penalty": float(self.diversity_penalty)}
        return DecodingSpec(method="diverse_beam_search", args={**args, **groups})

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """What outputs are ordered by; minus infinity for one that failed before its first token."""
        return cumulative_logprob / num_tokens**self.length_penalty if num_tokens else -math.inf

    def replace(self, **changes: Any) -> BeamSearchParams:
        """A copy with some fields changed, validated again."""
        BeamSearchParams.check_names(changes)
        return msgspec.structs.replace(self, **changes)


# whatever says how a request is decoded
GenerationParams: TypeAlias = SamplingParams | BeamSearchParams


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))

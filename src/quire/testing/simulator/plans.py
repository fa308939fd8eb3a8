"""What a request asks of a core on the simulated executor, and what it must therefore produce.

Nothing here looks at the core. The tokens follow from the checking model (executor/checking_model.py), the ends from
the rules of 3.2.2, beams from the brute-force reference (beam_reference.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from quire.messages import DecodingSpec, EngineRequest
from quire.testing.beam_reference import BeamSettings, beam_search
from quire.testing.simulator.checking_model import log_probabilities, next_token, prefix_hashes


@dataclass(frozen=True)
class Outcome:
    """One output as the client must see it, without what was given. `logprobs` are of beams only."""

    tokens: list[int]
    finish_reason: str
    stop_reason: int | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Plan:
    """A request, its whole prompt (kept tokens and streamed parts included), and what is still to be sent of it."""

    request: EngineRequest
    prompt: list[int]
    vocab_size: int
    max_model_len: int
    # what follows the prompt and was sampled by another engine; it is not sampled again
    given: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    # all of the prompt was sent
    is_complete: bool = False
    # the core has said that it computes
    has_started: bool = False
    # a token of it has arrived, so that its sequences have forked
    has_output: bool = False
    # one of its rows was made to fail; it can never run
    may_fail: bool = False
    must_fail: bool = False
    # when it was added, or extended, it did not fit without sharing
    may_be_refused: bool = False

    @property
    def num_outputs(self) -> int:
        return self.request.sampling.n

    @property
    def num_sequences(self) -> int:
        """Lines of tokens that run side by side."""
        return int(self.request.decoding.args["width"]) if self.request.decoding else self.num_outputs

    @property
    def is_open(self) -> bool:
        """More of the prompt is to be sent, or the word that it is complete."""
        return not self.request.is_final and not self.is_complete

    @property
    def max_tokens(self) -> int:
        room = self.max_model_len - len(self.prompt)
        return min(room, self.request.sampling.max_tokens or room)

    @property
    def end_ids(self) -> set[int]:
        return self._eos_ids | set(self.request.sampling.stop_token_ids)

    @property
    def _eos_ids(self) -> set[int]:
        return set() if self.request.sampling.ignore_eos else set(self.request.eos_token_ids)

    def stop_reason(self, token: int) -> int | None:
        """The token, if it ends the output and is not the model's own end of text."""
        return token if token in self.end_ids - self._eos_ids else None

    @cached_property
    def hashes(self) -> list[int]:
        """Of every prefix of the prompt."""
        return prefix_hashes(self.prompt)

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """By output."""
        if self.request.decoding:
            return _beams(self, self.request.decoding)
        return [_sampled(self, index) for index in range(self.num_outputs)]


def seed_of(seed: int, index: int) -> int:
    """Independent seeds for the sequences of one request; the first keeps the request's own."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF


def _sampled(plan: Plan, index: int) -> Outcome:
    """Token after token until a stop token or the greatest length."""
    sampling = plan.request.sampling
    seed = seed_of(plan.request.seed, index)
    tokens: list[int] = []
    num_given, most, end_ids = len(plan.given), plan.max_tokens, plan.end_ids
    is_greedy, parent = sampling.is_greedy, plan.hashes[-1]
    while len(tokens) < most:
        token = next_token(parent, seed, is_greedy, plan.vocab_size)
        tokens.append(token)
        if token in end_ids and len(tokens) >= sampling.min_tokens:
            return Outcome(tokens[num_given:], "stop", plan.stop_reason(token))
        (parent,) = prefix_hashes([token], parent)
    return Outcome(tokens[num_given:], "length")


def _beams(plan: Plan, decoding: DecodingSpec) -> list[Outcome]:
    sampling, args = plan.request.sampling, decoding.args
    settings = BeamSettings(
        width=args["width"],
        max_tokens=plan.max_tokens,
        eos_token_ids=tuple(plan.request.eos_token_ids),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        temperature=sampling.temperature,
        **{name: value for name, value in args.items() if name != "width"},
    )
    best = beam_search(_logits(plan), plan.prompt, settings).hypotheses[: plan.num_outputs]
    return [
        Outcome(
            one.tokens,
            one.finish_reason,
            plan.stop_reason(one.tokens[-1]),
            one.logprobs,
        )
        for one in best
    ]


def _logits(plan: Plan) -> Callable[[tuple[int, ...]], Any]:
    """The checking model as a function of a prefix, which always begins with the prompt."""
    length, parent = len(plan.prompt), plan.hashes[-1]
    unscaled = np.ones(1)

    def logits(prefix: tuple[int, ...]) -> Any:
        last = prefix_hashes(prefix[length:], parent)[-1] if len(prefix) > length else parent
        return log_probabilities(np.array([last], dtype=np.uint64), unscaled, plan.vocab_size)[0]

    return logits

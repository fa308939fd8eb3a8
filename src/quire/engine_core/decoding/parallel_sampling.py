"""Parallel sampling (3.4.4, figure 3.8): n samples of one prompt, which is computed once and shared by all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine_core.decoding.method import Verbs
from quire.engine_core.request import Request, Sequence
from quire.messages import Candidates


@dataclass(frozen=True)
class ParallelSampling:
    """Forks n - 1 children when the prompt's first token arrives.

    A child starts one token before its parent's first sample: it computes the last prompt token once more and draws its
    own first token with its own seed. So the worker samples one token a row, always, and needs no word for "n".
    """

    num_sequences: int
    num_candidates: int = 0

    @property
    def num_outputs(self) -> int:
        return self.num_sequences

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        num_prompt = sequence.num_total_tokens - 1
        for index in range(1, self.num_sequences):
            verbs.fork(sequence, index, num_prompt, num_prompt - 1)
        return False

    def after_candidates(self, request: Request, answers: Mapping[int, Candidates], verbs: Verbs) -> None:
        raise AssertionError("the worker samples here")

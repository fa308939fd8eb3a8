"""Parallel sampling (3.4.4, figure 3.8): n samples of one prompt, which is computed once and shared by all of them."""

from __future__ import annotations

from quire.engine_core.decoding.method import Verbs
from quire.engine_core.request import Sequence
from quire.sampling_params import SamplingParams


class ParallelSampling:
    """Forks n - 1 children when the prompt's first token arrives.

    A child starts one token before its parent's first sample: it computes the last prompt token once more and draws its
    own first token with its own seed. So the worker samples one token a row, always, and needs no word for "n".
    """

    def num_sequences(self, sampling: SamplingParams) -> int:
        return sampling.n

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        for index in range(1, sequence.request.num_sequences):
            verbs.fork(sequence, index, sequence.num_total_tokens - 1)
        return False

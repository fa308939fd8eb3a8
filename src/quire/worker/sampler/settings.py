"""Sampling parameters of every row, as arrays, so that a mixed batch costs what a uniform one does.

Filled when a row is admitted or forked. Owned by Sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.messages import AdmittedSequence, ForkedSequence, IntArray
from quire.worker.sampler.choose import DrawSettings, UIntArray, hashed, to_uint64, uniforms_of

# stands for "all tokens", so that one comparison with the vocabulary covers it
ALL_TOKENS = np.iinfo(np.int64).max


class RowSettings:
    """Arrays over rows. What no longer belongs to a sequence is overwritten by the next one."""

    def __init__(self, num_rows: int) -> None:
        # exactly 0 for greedy rows
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.full(num_rows, ALL_TOKENS, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float64)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        # -1: none were asked for
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        # above 0: the core chooses the next token out of so many
        self.num_candidates = np.zeros(num_rows, dtype=np.int64)
        self._inherited: tuple[npt.NDArray[Any], ...] = (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.num_logprobs,
            self.num_candidates,
        )

    def admit(self, sequence: AdmittedSequence) -> None:
        row = sequence.row
        sampling = sequence.sampling
        self.temperature[row] = 0.0 if sampling.is_greedy else sampling.temperature
        self.top_k[row] = sampling.top_k if sampling.top_k > 0 else ALL_TOKENS
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = to_uint64(sequence.seed)
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_candidates[row] = sequence.num_candidates

    def fork(self, fork: ForkedSequence) -> None:
        for column in self._inherited:
            column[fork.row] = column[fork.parent_row]
        self.seed[fork.row] = to_uint64(fork.seed)

    def draws_of(self, rows_N: IntArray) -> RowDraws | None:
        """How these rows draw; None if every one is greedy."""
        temperature_N = self.temperature[rows_N]
        if not temperature_N.any():
            return None
        columns = temperature_N, self.top_k[rows_N], self.top_p[rows_N], self.min_p[rows_N]
        return RowDraws(columns, hashed(self.seed[rows_N]))

    def draw_settings(self, rows_N: IntArray, lengths_N: IntArray) -> DrawSettings | None:
        """How to draw the token after so many of each row; None if every row is greedy."""
        draws = self.draws_of(rows_N)
        return None if draws is None else draws.after(lengths_N)


@dataclass(frozen=True)
class RowDraws:
    """What stays the same from step to step of how some rows draw: all but the uniform numbers."""

    columns: tuple[npt.NDArray[np.float32], IntArray, npt.NDArray[np.float64], npt.NDArray[np.float32]]
    hashed_seeds: UIntArray

    def after(self, lengths_N: IntArray) -> DrawSettings:
        """How to draw the token after so many of each row."""
        return DrawSettings(*self.columns, uniforms_of(self.hashed_seeds, lengths_N))

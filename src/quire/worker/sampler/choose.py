"""From processed logits to one token a row, the parameters that say how, and the numbers that decide.

What is done with them is a kernel's. Numbers follow from seed and position (`uniform_numbers.py`), whatever the batch,
order or history: a sequence that is preempted and resumed, or moved to another row, draws the same ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray
from quire.uniform_numbers import UIntArray, hashed, to_uint64, uniforms_of
from quire.worker import kernels
from quire.worker.kernels.reference.draw import rows_in_slice

__all__ = ["DrawSettings", "best_tokens", "choose_tokens", "rows_in_slice"]


@dataclass(frozen=True)
class DrawSettings:
    """Parameters of rows, one entry a row. A temperature of 0 means greedy."""

    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]

    @classmethod
    def greedy(cls, num_rows: int) -> DrawSettings:
        return cls(
            temperature=np.zeros(num_rows, dtype=np.float32),
            top_k=np.full(num_rows, ALL_TOKENS, dtype=np.int64),
            top_p=np.ones(num_rows, dtype=np.float64),
            min_p=np.zeros(num_rows, dtype=np.float32),
            uniform=np.zeros(num_rows),
        )

    def select(self, index: IntArray) -> DrawSettings:
        return DrawSettings(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


# stands for "all tokens", so that one comparison with the vocabulary covers it
ALL_TOKENS = np.iinfo(np.int64).max


class RowSettings:
    """Sampling parameters of every row, as arrays, so that a mixed batch costs what a uniform one does.

    Filled when a row is admitted or forked; what no longer belongs to a sequence is overwritten by the next one. Owned
    by Sampler.
    """

    def __init__(self, num_rows: int) -> None:
        # exactly 0 for greedy rows
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.full(num_rows, ALL_TOKENS, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float64)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        # -1: none were asked for
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        # row -> tokens whose log-probabilities are asked for in place of the best
        self.named_tokens: dict[int, IntArray] = {}
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
        self._name_tokens(row, sampling.logprob_token_ids)

    def fork(self, fork: ForkedSequence) -> None:
        for column in self._inherited:
            column[fork.row] = column[fork.parent_row]
        self.seed[fork.row] = to_uint64(fork.seed)
        self._name_tokens(fork.row, self.named_tokens.get(fork.parent_row))

    def _name_tokens(self, row: int, token_ids: Sequence[int] | IntArray | None) -> None:
        self.named_tokens.pop(row, None)
        if token_ids is not None:
            self.named_tokens[row] = np.asarray(token_ids, dtype=np.int64)

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
        return DrawSettings(*self.columns, self.uniforms(lengths_N))

    def uniforms(self, lengths: IntArray) -> npt.NDArray[np.float64]:
        """The numbers that decide about the token after so many of each row, [..., rows]."""
        return uniforms_of(self.hashed_seeds, lengths)


def choose_tokens(
    logits_NV: Tensor, settings: DrawSettings | None, rows_n: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token, greatest logit) of these rows, or of all. Without settings every row is greedy."""
    if settings is None:
        return kernels.best_tokens(logits_NV, rows_n)
    return kernels.choose_tokens(
        logits_NV,
        rows_n,
        temperature_n=torch.from_numpy(settings.temperature),
        top_k_n=torch.from_numpy(settings.top_k),
        top_p_n=torch.from_numpy(settings.top_p),
        min_p_n=torch.from_numpy(settings.min_p),
        uniform_n=torch.from_numpy(settings.uniform),
    )


def best_tokens(logits_NV: Tensor) -> Tensor:
    """The greatest logit's token; the lowest id among equals. A row with a NaN gets the place of the NaN."""
    return kernels.best_tokens(logits_NV)[0]

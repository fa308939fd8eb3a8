"""From processed logits to one token a row, the parameters that say how, and the numbers that decide.

What is done with them is a kernel's. Randomness counts: one uniform number for each (seed, position), whatever the
batch, order or history. A sequence that is preempted and resumed, or moved to another row, draws the same numbers
again, and nothing is stored. The hash is the finalizer of SplitMix64, applied to the seed and then to the seed's hash
and the position together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray
from quire.worker import kernels
from quire.worker.kernels.reference.draw import rows_in_slice

__all__ = ["DrawSettings", "best_tokens", "choose_tokens", "rows_in_slice"]

UIntArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# 48 bits: u and its product with a sum of float32 weights stay exactly below the sum in float64
_BITS = 48


@dataclass(frozen=True)
class DrawSettings:
    """Parameters of rows, one entry a row. A temperature of 0 means greedy."""

    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]

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


def to_uint64(seed: int) -> int:
    """Seeds of any sign and size up to 64 bits, modulo 2**64."""
    return seed & 0xFFFFFFFFFFFFFFFF


def hashed(seeds: UIntArray) -> UIntArray:
    """What `uniforms_of` takes of a seed. It is the same at every position."""
    return _mix(seeds + _GOLDEN)


def uniforms_of(hashed_seeds: UIntArray, positions: IntArray) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1): the same for the same seed and position."""
    mixed = _mix(hashed_seeds ^ _mix(positions.astype(np.uint64) * _GOLDEN + _MIX_1))
    return (mixed >> np.uint64(64 - _BITS)).astype(np.float64) / float(1 << _BITS)


def _mix(x: UIntArray) -> UIntArray:
    """SplitMix64's finalizer; integers wrap around."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))

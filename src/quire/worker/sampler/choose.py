"""From processed logits to one token a row, the parameters that say how, and the numbers that decide.

What is done with them is a kernel's. Randomness counts: one uniform number for each (seed, position), whatever the
batch, order or history. A sequence that is preempted and resumed, or moved to another row, draws the same numbers
again, and nothing is stored. The hash is the finalizer of SplitMix64, applied to the seed and then to the seed's hash
and the position together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import IntArray
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

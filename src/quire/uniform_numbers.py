"""Randomness that counts: one uniform number for each (seed, position), whatever came before.

Nothing is stored, so whoever starts again draws the same numbers. The hash is the finalizer of SplitMix64, applied to
the seed and then to the seed's hash and the position together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UIntArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# 48 bits: u and its product with a sum of float32 weights stay exactly below the sum in float64
_BITS = 48


def to_uint64(seed: int) -> int:
    """Seeds of any sign and size up to 64 bits, modulo 2**64."""
    return seed & 0xFFFFFFFFFFFFFFFF


def hashed(seeds: UIntArray) -> UIntArray:
    """What `uniforms_of` takes of a seed. It is the same at every position."""
    return _mix(seeds + _GOLDEN)


def uniforms_of(hashed_seeds: UIntArray, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1): the same for the same seed and position."""
    mixed = _mix(hashed_seeds ^ _mix(positions.astype(np.uint64) * _GOLDEN + _MIX_1))
    return (mixed >> np.uint64(64 - _BITS)).astype(np.float64) / float(1 << _BITS)


def _mix(x: UIntArray) -> UIntArray:
    """SplitMix64's finalizer; integers wrap around."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))

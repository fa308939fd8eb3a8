"""A step by what steps were measured to take: for a processor that no data sheet describes.

    seconds = fixed + curve(tokens) + a x sampled + b x context read + c x pairs of attention + d x blocks moved

The curve rises from knot to knot, at powers of two, as steeply as the steps say: a few tokens share the reading of the
weights, many do not. No part is negative. Fitted to relative errors, so that short steps count as much as long ones,
and to these themselves, not to their squares: a step that met other work on the machine is an accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine_core.executor.modelled import Amount, Floats, StepWork

# a relative error below this is as good as none
_GOOD = 0.01
_NUM_FITS = 12
_NUM_SWEEPS = 400


@dataclass(frozen=True)
class TableCosts:
    """Slopes of the curve from each knot to the next, and prices of the rest."""

    fixed: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]
    per_sampled: float
    per_context_token: float
    per_pair: float
    per_moved_block: float

    def seconds(self, work: StepWork) -> Amount:
        fixed = self.fixed + self._curve(work.num_tokens) + self.per_sampled * work.num_sampled
        fixed += self.per_moved_block * (work.num_copied_blocks + work.num_swapped_blocks)
        return fixed + self.per_context_token * work.context_tokens + self.per_pair * work.attention_pairs

    def _curve(self, num_tokens: int) -> float:
        seconds = 0.0
        for knot, slope in zip(self.knots, self.slopes, strict=True):
            if num_tokens <= knot:
                break
            seconds += slope * (min(num_tokens, 2 * knot) - knot if knot != self.knots[-1] else num_tokens - knot)
        return seconds

    @classmethod
    def fit(cls, works: Sequence[StepWork], seconds: Sequence[float]) -> TableCosts:
        """At least a few steps of every size that will be asked for."""
        took = np.array(seconds)
        most = max(work.num_tokens for work in works)
        knots = tuple(1 << power for power in range(max(1, (most - 1).bit_length())))
        columns = np.array([_columns(work, knots) for work in works])
        relative = columns / took[:, None]
        weights = np.ones(len(took))
        for _ in range(_NUM_FITS):
            found = _least_squares(relative, weights)
            # squares that are weighed so are absolute values
            weights = 1 / np.maximum(np.abs(relative @ found - 1), _GOOD)
        num = len(knots)
        fixed, slopes, rest = found[0], found[1 : 1 + num], found[1 + num :]
        return cls(float(fixed), knots, tuple(slopes.tolist()), *rest.tolist())


def _columns(work: StepWork, knots: tuple[int, ...]) -> list[float]:
    above = [
        max(0, (work.num_tokens if knot == knots[-1] else min(work.num_tokens, 2 * knot)) - knot) for knot in knots
    ]
    num_moved = work.num_copied_blocks + work.num_swapped_blocks
    return [
        1.0, *map(float, above), float(work.num_sampled), float(work.context_tokens), float(work.attention_pairs),
        float(num_moved),
    ]  # fmt: skip


def _least_squares(columns: Floats, weights: Floats) -> Floats:
    """x >= 0 for which columns @ x is nearest to 1, one number after the other until nothing changes."""
    scale = np.sqrt((columns**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = columns / scale
    products = (scaled * weights[:, None]).T @ scaled
    target = weights @ scaled
    found = np.zeros(len(scale))
    for _ in range(_NUM_SWEEPS):
        before = found.copy()
        for place in range(len(found)):
            if products[place, place] > 0:
                rest = target[place] - products[place] @ found + products[place, place] * found[place]
                found[place] = max(0.0, rest / products[place, place])
        if np.allclose(found, before, rtol=1e-9, atol=1e-15):
            break
    result: Floats = found / scale
    return result

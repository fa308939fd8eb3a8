"""How long clients waited between two tokens: a histogram of one per cent a bin, so that memory does not grow."""

from __future__ import annotations

import numpy as np

from quire.engine_core.executor.modelled import Floats
from quire.messages import IntArray

_SHORTEST = 1e-6
_LONGEST = 1e5
_EDGES = np.exp(np.arange(np.log(_SHORTEST), np.log(_LONGEST), 0.01))


class Gaps:
    """Seconds, each counted as often as it was seen."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, dtype=np.int64)
        self.longest = 0.0

    def add(self, seconds: Floats | list[float], weight: int | IntArray = 1) -> None:
        """Each of these, for so many clients."""
        if not len(seconds):
            return
        bins = np.searchsorted(_EDGES, seconds)
        np.add.at(self._counts, bins, weight)
        self.longest = max(self.longest, float(np.max(seconds)))

    def merge(self, other: Gaps) -> None:
        self._counts += other._counts
        self.longest = max(self.longest, other.longest)

    def percentile(self, share: float) -> float:
        """The upper edge of the bin in which it lies."""
        total = int(self._counts.sum())
        if not total:
            return 0.0
        place = int(np.searchsorted(self._counts.cumsum(), share / 100 * total))
        return min(self.longest, float(_EDGES[min(place, len(_EDGES) - 1)]))

    @property
    def mean(self) -> float:
        """Of the middles of the bins."""
        total = int(self._counts.sum())
        middles = np.concatenate([_EDGES[:1], np.sqrt(_EDGES[1:] * _EDGES[:-1]), _EDGES[-1:]])
        return float((self._counts * middles).sum() / total) if total else 0.0

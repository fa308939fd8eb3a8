"""How long clients waited between two tokens: a histogram of one per cent a bin, so that memory does not grow."""

from __future__ import annotations

import numpy as np

from quire.engine_core.executor.modelled import Floats
from quire.messages import IntArray

_SHORTEST = 1e-6
_LONGEST = 1e5
_COUNTED_AT_ONCE = 256
_EDGES = np.exp(np.arange(np.log(_SHORTEST), np.log(_LONGEST), 0.01))


class Gaps:
    """Seconds, each counted as often as it was seen."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, dtype=np.int64)
        self.longest = 0.0
        # what was seen and is not counted yet, once and more often: a step has few, and counting takes as long for many
        self._once: list[float] = []
        self._seen: list[Floats] = []
        self._weights: list[IntArray] = []
        self._num_seen = 0

    def add(self, seconds: list[float]) -> None:
        """Each of these, once."""
        self._once += seconds
        if len(self._once) > _COUNTED_AT_ONCE:
            self._count()

    def add_many(self, seconds: Floats, weights: IntArray) -> None:
        """Each of these, for so many clients."""
        self._seen.append(seconds)
        self._weights.append(weights)
        self._num_seen += len(seconds)
        if self._num_seen > _COUNTED_AT_ONCE:
            self._count()

    def _count(self) -> None:
        """All that was seen."""
        if self._once or self._num_seen:
            seconds = np.concatenate([np.array(self._once), *self._seen])
            weights = np.concatenate([np.ones(len(self._once), dtype=np.int64), *self._weights])
            np.add.at(self._counts, np.searchsorted(_EDGES, seconds), weights)
            self.longest = max(self.longest, float(seconds.max()))
            self._once, self._seen, self._weights, self._num_seen = [], [], [], 0

    def merge(self, other: Gaps) -> None:
        other._count()
        self._counts += other._counts
        self.longest = max(self.longest, other.longest)

    def percentile(self, share: float) -> float:
        """The upper edge of the bin in which it lies."""
        self._count()
        total = int(self._counts.sum())
        if not total:
            return 0.0
        place = int(np.searchsorted(self._counts.cumsum(), share / 100 * total))
        return min(self.longest, float(_EDGES[min(place, len(_EDGES) - 1)]))

    @property
    def mean(self) -> float:
        """Of the middles of the bins."""
        self._count()
        total = int(self._counts.sum())
        middles = np.concatenate([_EDGES[:1], np.sqrt(_EDGES[1:] * _EDGES[:-1]), _EDGES[-1:]])
        return float((self._counts * middles).sum() / total) if total else 0.0

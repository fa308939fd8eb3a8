"""Names that were found once and no longer are, and why: for whoever asks why a prompt was computed again.

Bounded: what was lost longest ago is forgotten. Owned by BlockPool, asked by PrefixCache.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.engine_core.kv_cache_manager.cache_changes import BlockKey

# nine bytes each, and asking looks at all of them
MOST_NAMES = 65_536
_REASONS = ("evicted", "cleared")


class LostNames:
    """The most recent ones, as many as the pool can name, and not more than MOST_NAMES: 64 bits of each name, in a
    ring. (An ordered dict takes 250 bytes each.)"""

    def __init__(self, num_blocks: int) -> None:
        self._most = min(num_blocks, MOST_NAMES)
        self._names = np.zeros(self._most, dtype=np.uint64)
        self._places = self._names.data
        self._reasons = bytearray(self._most)
        self._num_added = 0

    def add(self, keys: Iterable[BlockKey], reason: str) -> None:
        number = _REASONS.index(reason)
        for key in keys:
            place = self._num_added % self._most
            self._places[place] = _number_of(key)
            self._reasons[place] = number
            self._num_added += 1

    def reason(self, key: BlockKey) -> str | None:
        """Of the last time that it was lost."""
        places = (self._names[: len(self)] == _number_of(key)).nonzero()[0]
        if not len(places):
            return None
        ages = (self._num_added - 1 - places) % self._most
        return _REASONS[self._reasons[int(places[ages.argmin()])]]

    def __len__(self) -> int:
        return min(self._num_added, self._most)


def _number_of(key: BlockKey) -> int:
    group, name = key
    return int.from_bytes(name[-8:], "big") ^ group

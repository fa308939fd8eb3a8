"""Names that were found once and no longer are, and why: for whoever asks why a prompt was computed again.

Bounded: what was lost longest ago is forgotten. Owned by BlockPool, asked by PrefixCache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.engine_core.kv_cache_manager.cache_changes import BlockKey

# some 250 bytes each
MOST_NAMES = 65_536


class LostNames:
    """The most recent ones, as many as the pool can name, and not more than MOST_NAMES."""

    def __init__(self, num_blocks: int) -> None:
        self._most = min(num_blocks, MOST_NAMES)
        # In the order in which they were lost. Of a dict, the first entry is found behind all that have left it.
        self._reasons: OrderedDict[BlockKey, str] = OrderedDict()

    def add(self, keys: Iterable[BlockKey], reason: str) -> None:
        reasons = self._reasons
        for key in keys:
            reasons[key] = reason
            reasons.move_to_end(key)
            if len(reasons) > self._most:
                reasons.popitem(last=False)

    def reason(self, key: BlockKey) -> str | None:
        return self._reasons.get(key)

    def __len__(self) -> int:
        return len(self._reasons)

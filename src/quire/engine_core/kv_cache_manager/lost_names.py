"""Names that were found once and no longer are, and why: for whoever asks why a prompt was computed again.

Bounded: what was lost longest ago is forgotten. Owned by BlockPool, asked by PrefixCache.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine_core.kv_cache_manager.cache_changes import BlockKey


class LostNames:
    """The most recent ones, as many as the pool can name."""

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks
        # in the order in which they were lost
        self._reasons: dict[BlockKey, str] = {}

    def add(self, keys: Iterable[BlockKey], reason: str) -> None:
        reasons = self._reasons
        for key in keys:
            reasons.pop(key, None)
            reasons[key] = reason
        while len(reasons) > self._most:
            del reasons[next(iter(reasons))]

    def reason(self, key: BlockKey) -> str | None:
        return self._reasons.get(key)

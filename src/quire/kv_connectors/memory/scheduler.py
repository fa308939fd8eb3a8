"""The memory connector's scheduler half: looks into the shared store."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

import numpy as np

from quire.errors import OptionError
from quire.kv_connectors.connector import CacheLayout, Tokens
from quire.kv_connectors.memory.store import PrefixStore, StoredPrefix
from quire.messages import KVTransfer

logger = logging.getLogger("quire.kv_connectors")

_MOST_REMEMBERED = 100


class MemoryScheduler:
    """What it finds is in memory, so it can be had at once."""

    def __init__(self, layout: CacheLayout, store: PrefixStore) -> None:
        if layout.has_windows:
            raise OptionError(
                "kv_connector=memory: layers with a sliding window keep only the end of a prefix, which this connector "
                "cannot hand over. Leave kv_connector out for this model."
            )
        self._layout = layout
        self._store = store
        self._num_refused = 0
        # one line a key: requests that wait are looked up in each step
        self._refused_keys: set[str] = set()

    def reason_to_refuse(self, transfer: KVTransfer) -> str | None:
        return None

    def find(self, key: str, token_ids: Tokens) -> StoredPrefix | None:
        found = self._store.find(key)
        reason = None if found is None else self._reason_not_to_use(found, token_ids)
        if reason is not None and key not in self._refused_keys:
            self._num_refused += 1
            self._refused_keys = {key, *islice(self._refused_keys, _MOST_REMEMBERED)}
            logger.warning("KV under key %r is not used: %s; its tokens are computed", key, reason)
        return found if reason is None else None

    def load(self, found: Any) -> int:
        return self._store.lend(found)

    def statistics(self) -> dict[str, float]:
        return {**self._store.statistics(), "num_prefixes_refused_total": self._num_refused}

    def _reason_not_to_use(self, found: StoredPrefix, token_ids: Tokens) -> str | None:
        difference = self._layout.difference(found.layout)
        if difference is not None:
            return f"this engine has {difference}"
        length = min(len(token_ids), len(found.token_ids))
        if not np.array_equal(found.token_ids[:length], token_ids[:length]):
            return "it belongs to other tokens"
        return None

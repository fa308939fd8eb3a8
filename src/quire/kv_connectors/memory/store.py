"""The store that the engines of one process share: contents of blocks under keys, bounded in bytes.

Knows neither tensors nor block tables. Engines run in threads of their own, so each operation holds a lock. A store
lives as long as an engine that opened it.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from quire.config import num_bytes_of
from quire.kv_connectors.connector import CacheLayout, Tokens

_DEFAULT_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredPrefix:
    """Tokens from the first on, and what the blocks hold that they lie in."""

    key: str
    layout: CacheLayout
    token_ids: Tokens
    # for each tensor of the cache: an array of its kind, [group, block, ...]
    parts: list[Any]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return int(self.token_ids.nbytes) + sum(int(part.nbytes) for part in self.parts)


class PrefixStore:
    """Least recently used prefixes leave when there is no room."""

    def __init__(self, max_bytes: int = _DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_stored = 0
        self.num_evicted = 0
        self._by_key: OrderedDict[str, StoredPrefix] = OrderedDict()
        # on their way into a cache; whatever becomes of their key
        self._lent: dict[int, StoredPrefix] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, prefix: StoredPrefix) -> None:
        """In the place of what was there. One that is larger than the store goes at once."""
        with self._lock:
            self._drop(prefix.key)
            self._by_key[prefix.key] = prefix
            self.num_bytes += prefix.num_bytes
            self.num_stored += 1
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._by_key)))
                self.num_evicted += 1

    def find(self, key: str) -> StoredPrefix | None:
        with self._lock:
            return self._by_key.get(key)

    def drop(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def lend(self, prefix: StoredPrefix) -> int:
        """A number by which it can be taken once, also if it has been evicted since."""
        with self._lock:
            number = next(self._numbers)
            self._lent[number] = prefix
            if self._by_key.get(prefix.key) is prefix:
                self._by_key.move_to_end(prefix.key)
            return number

    def take(self, number: int) -> StoredPrefix:
        with self._lock:
            return self._lent.pop(number)

    def statistics(self) -> dict[str, float]:
        with self._lock:
            return {
                "num_stored_prefixes": len(self._by_key),
                "stored_prefix_bytes": self.num_bytes,
                "num_prefixes_stored_total": self.num_stored,
                "num_prefixes_evicted_total": self.num_evicted,
            }

    def _drop(self, key: str) -> None:
        prefix = self._by_key.pop(key, None)
        self.num_bytes -= prefix.num_bytes if prefix is not None else 0


_stores: WeakValueDictionary[str, PrefixStore] = WeakValueDictionary()
_stores_lock = threading.Lock()


def open_store(name: str, max_bytes: int | str | None = None) -> PrefixStore:
    """The store of that name in this process; with a size, that is its size from now on."""
    num_bytes = None if max_bytes is None else num_bytes_of(max_bytes, "kv_connector: max_bytes")
    with _stores_lock:
        store = _stores.get(name)
        if store is None:
            store = _stores[name] = PrefixStore()
        store.max_bytes = num_bytes or store.max_bytes
        return store

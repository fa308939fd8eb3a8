"""The memory connector's worker half for the simulated executor: what checking caches hold is stored and brought back.

Hashes of prefixes travel instead of keys and values, so content that is loaded into the wrong block, too late or not at
all, is noticed when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_connectors.connector import BlockLoad, BlockStore, CacheLayout
from quire.kv_connectors.memory.store import PrefixStore, StoredPrefix
from quire.testing.simulator.checking_cache import CheckingCache


def simulated_layout(block_size: int) -> CacheLayout:
    """Of all engines without a model, as far as they have equal blocks."""
    return CacheLayout("simulated", "", block_size, ())


class SimulatedConnector:
    """`tensors` are checking caches."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self.num_loaded_blocks = 0
        self.num_stored_blocks = 0

    def open(self, layout: CacheLayout, tensors: Sequence[CheckingCache]) -> None:
        self._layout = layout
        self._caches = tensors

    def load(self, loads: list[BlockLoad]) -> None:
        blocks = np.array([block for load in loads for group in load.blocks for block in group])
        assert len(set(blocks.tolist())) == len(blocks), "two loads into one block"
        for load in loads:
            prefix, targets = self._store.take(load.source), np.array(load.blocks)
            wanted = slice(load.first_block, load.first_block + targets.shape[1])
            for cache, cells in zip(self._caches, prefix.parts, strict=True):
                cache.set_blocks(targets, cells[:, wanted])
            self.num_loaded_blocks += targets.size

    def store(self, stores: list[BlockStore]) -> None:
        for store in stores:
            blocks = np.array(store.blocks)
            parts = [cache.blocks_at(blocks) for cache in self._caches]
            self._store.put(StoredPrefix(store.key, self._layout, store.token_ids, parts))
            self.num_stored_blocks += blocks.size

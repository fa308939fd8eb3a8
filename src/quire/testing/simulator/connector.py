"""The connectors' worker halves for the simulated executor: what checking caches hold is stored and brought back.

Hashes of prefixes travel instead of keys and values, so content that is loaded into the wrong block, too late or not at
all, is noticed when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_connectors.connector import BlockLoad, BlockSpill, BlockStore, CacheLayout
from quire.kv_connectors.memory.store import PrefixStore, StoredPrefix
from quire.kv_connectors.tiered.tiers import Tiers
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

    def spill(self, spills: list[BlockSpill]) -> None:
        assert not spills, "this connector knows whole prefixes only"

    def close(self) -> None: ...


class SimulatedTieredConnector:
    """The tiered connector's: cells as bytes."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.num_loaded_blocks = 0
        self.num_stored_blocks = 0
        tiers.enter()

    def open(self, layout: CacheLayout, tensors: Sequence[CheckingCache]) -> None:
        self._caches = tensors

    def load(self, loads: list[BlockLoad]) -> None:
        for load in loads:
            payloads = self._tiers.host.take(load.source)
            blocks = [block for index in zip(*load.blocks, strict=True) for block in index]
            assert len(set(blocks)) == len(blocks), "two loads into one block"
            cells = np.stack(payloads).view(np.uint64).reshape(len(blocks), len(self._caches), -1)
            for number, cache in enumerate(self._caches):
                cache.set_blocks(np.array(blocks), cells[:, number])
            self.num_loaded_blocks += len(blocks)

    def store(self, stores: list[BlockStore]) -> None:
        assert not stores, "this connector knows single blocks only"

    def spill(self, spills: list[BlockSpill]) -> None:
        for spill in spills:
            cells = np.concatenate([cache.blocks_at(np.array([spill.block]))[0] for cache in self._caches])
            self._tiers.put({spill.name: cells.view(np.uint8)})
            self.num_stored_blocks += 1

    def close(self) -> None:
        self._tiers.leave()

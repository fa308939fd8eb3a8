"""The memory connector's worker half: copies the contents of blocks to the host, and back into other blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kv_connectors.connector import BlockLoad, BlockSpill, BlockStore, CacheLayout
from quire.kv_connectors.memory.store import PrefixStore, StoredPrefix


class MemoryWorker:
    """All groups share the tensors, so a block of any group is one entry of each of them."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store

    def open(self, layout: CacheLayout, tensors: Sequence[Tensor]) -> None:
        self._layout = layout
        self._tensors = list(tensors)

    def load(self, loads: list[BlockLoad]) -> None:
        for load in loads:
            prefix = self._store.take(load.source)
            blocks = torch.tensor(load.blocks)
            wanted = slice(load.first_block, load.first_block + blocks.shape[1])
            for tensor, part in zip(self._tensors, prefix.parts, strict=True):
                tensor[blocks.to(tensor.device)] = part[:, wanted].to(tensor.device)

    def store(self, stores: list[BlockStore]) -> None:
        for store in stores:
            blocks = torch.tensor(store.blocks)
            # indexing copies
            parts = [tensor[blocks.to(tensor.device)].cpu() for tensor in self._tensors]
            self._store.put(StoredPrefix(store.key, self._layout, store.token_ids.astype(np.int32), parts))

    def spill(self, spills: list[BlockSpill]) -> None:
        raise AssertionError("this connector knows whole prefixes only")

    def close(self) -> None: ...

"""The tiered connector's worker half: blocks of the cache to bytes in memory, and back into other blocks.

The tensors of a cache hold bytes, [num_blocks, bytes of a block], and all groups share them: what a block holds is one
row of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from quire.kv_connectors.connector import BlockLoad, BlockSpill, BlockStore, CacheLayout
from quire.kv_connectors.tiered.payload import Payload
from quire.kv_connectors.tiered.tiers import Tiers


class TieredWorker:
    """Copies to and from memory, and waits for no store."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        tiers.enter()

    def open(self, layout: CacheLayout, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.flatten(1) for tensor in tensors]
        ends = accumulate((tensor.shape[1] for tensor in self._tensors), initial=0)
        self._parts = list(pairwise(ends))
        self._block_bytes = self._parts[-1][1]
        self._tiers.open(layout, self._block_bytes)

    def load(self, loads: list[BlockLoad]) -> None:
        for load in loads:
            payloads = self._tiers.host.take(load.source)
            blocks = [block for index in zip(*load.blocks, strict=True) for block in index]
            if any(payload.nbytes != self._block_bytes for payload in payloads):
                raise ValueError("a block of other bytes lies under the name of one of ours")
            if blocks:
                self._fill(blocks, np.stack(payloads))

    def _fill(self, blocks: list[int], payloads: Payload) -> None:
        places = torch.tensor(blocks)
        contents = torch.from_numpy(payloads)
        for tensor, (start, end) in zip(self._tensors, self._parts, strict=True):
            tensor[places.to(tensor.device)] = contents[:, start:end].to(tensor.device)

    def store(self, stores: list[BlockStore]) -> None:
        assert not stores, "this connector knows single blocks only"

    def spill(self, spills: list[BlockSpill]) -> None:
        places = torch.tensor([spill.block for spill in spills])
        contents = np.empty((len(spills), self._block_bytes), dtype=np.uint8)
        for tensor, (start, end) in zip(self._tensors, self._parts, strict=True):
            contents[:, start:end] = tensor[places.to(tensor.device)].cpu().numpy()
        # each on its own: one that stays must not keep the others in memory
        self._tiers.put({spill.name: row.copy() for spill, row in zip(spills, contents, strict=True)})

    def close(self) -> None:
        self._tiers.leave()

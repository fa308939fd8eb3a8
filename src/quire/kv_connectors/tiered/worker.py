"""The tiered connector's worker half: blocks of the cache to bytes in memory, and back into other blocks.

The tensors of a cache hold bytes, [num_blocks, bytes of a block], and all groups share them: what a block holds is one
row of each. Where several ranks keep a part of each block, the tiers hold whole ones, in the process of the first:

    block of a tier     [ rank 0: layer 0 | layer 1 | ... ][ rank 1: layer 0 | ... ] ...

So a block is there for all ranks or for none, and what a store has lost of one is lost of all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from quire.kv_connectors.connector import BlockLoad, BlockSpill, BlockStore, CacheLayout, Sharers
from quire.kv_connectors.tiered.payload import Payload
from quire.kv_connectors.tiered.tiers import BATCH_BYTES, Tiers

logger = logging.getLogger("quire.kv_connectors")


class _Alone:
    """Of a rank that keeps whole blocks."""

    number = 0
    num_in_stage = 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    def from_first(self, x: Tensor) -> Tensor:
        return x

    def total(self, number: float) -> float:
        return number


class TieredWorker:
    """Copies to and from memory, and waits for no store."""

    def __init__(self, tiers: Tiers | None, sharers: Sharers | None = None) -> None:
        """`tiers`: of the first of the ranks that share each block."""
        self._tiers = tiers
        self._sharers: Sharers = sharers or _Alone()
        if tiers is not None:
            tiers.enter()

    def open(self, layout: CacheLayout, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.flatten(1) for tensor in tensors]
        ends = accumulate((tensor.shape[1] for tensor in self._tensors), initial=0)
        self._parts = list(pairwise(ends))
        self._own_bytes = self._parts[-1][1]
        self._block_bytes = self._own_bytes * self._sharers.num_in_stage
        self._open_tiers(layout)

    def _open_tiers(self, layout: CacheLayout) -> None:
        if self._tiers is not None:
            self._tiers.open(layout, self._block_bytes)

    def load(self, loads: list[BlockLoad]) -> None:
        for load in loads:
            blocks = [block for index in zip(*load.blocks, strict=True) for block in index]
            contents = self._taken(load.source, len(blocks))
            if self._sharers.total(float(contents is None)):
                raise ValueError("blocks that were near cannot be loaded")
            assert contents is not None
            places = torch.tensor(blocks, dtype=torch.int64)
            size = max(1, BATCH_BYTES // self._block_bytes)
            for some, piece in zip(places.split(size), contents.split(size), strict=True):
                self._fill(some, self._sharers.from_first(piece.contiguous()))

    def _taken(self, source: Any, num_blocks: int) -> Tensor | None:
        """Whole blocks, on the first rank with their content; None: they cannot be had."""
        try:
            # first, since they are lent until they are taken
            payloads = None if self._tiers is None else self._tiers.host.take(source)
            contents = torch.empty((num_blocks, self._block_bytes), dtype=torch.uint8)
            if payloads is None:
                return contents
            for row, payload in zip(contents.numpy(), payloads, strict=True):
                if payload.nbytes != self._block_bytes:
                    raise ValueError(f"a block of {payload.nbytes} bytes lies under the name of one of ours")
                row[:] = payload
        except Exception:
            # not raised here, where memory is short either: the others would wait for the content
            logger.exception("%d blocks were near, and cannot be loaded", num_blocks)
            return None
        return contents

    def _fill(self, places: Tensor, contents: Tensor) -> None:
        first = self._sharers.number * self._own_bytes
        for tensor, (start, end) in zip(self._tensors, self._parts, strict=True):
            tensor[places.to(tensor.device)] = contents[:, first + start : first + end].to(tensor.device)

    def store(self, stores: list[BlockStore]) -> None:
        assert not stores, "this connector knows single blocks only"

    def spill(self, spills: list[BlockSpill]) -> None:
        places = torch.tensor([spill.block for spill in spills], dtype=torch.int64)
        contents = torch.empty((len(spills), self._own_bytes), dtype=torch.uint8)
        for tensor, (start, end) in zip(self._tensors, self._parts, strict=True):
            contents[:, start:end] = tensor[places.to(tensor.device)].cpu()
        whole = self._sharers.gather(contents).numpy()
        if self._sharers.number == 0:
            self._put({spill.name: row for spill, row in zip(spills, whole, strict=True)})

    def _put(self, rows: Mapping[bytes, Payload]) -> None:
        assert self._tiers is not None
        # each on its own: one that stays must not keep the others in memory
        self._tiers.put({name: row.copy() for name, row in rows.items()})

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.leave()

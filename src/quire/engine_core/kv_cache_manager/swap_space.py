"""Swap space (3.4.5): blocks in host memory for requests that gave way, with what they share still shared.

Owns the host blocks and their reference counts. A request goes out whole or not at all, each of its blocks once; it
comes back whole, into whatever blocks the pool has then. Called by the KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.engine_core.block_table import NO_BLOCK
from quire.engine_core.kv_cache_manager.block_moves import BlockMoves
from quire.engine_core.request import Request, Sequence


class SwapSpace:
    """Host blocks. Never more than the pool has: a request that is out held as many blocks when it was in."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._counts = [0] * num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        return self._free.copy()

    def has_room_for(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def swap_out(self, request: Request, block_size: int, moves: BlockMoves) -> None:
        """Every computed block of the request gets a host block; the caller then frees the device's."""
        host_block_of: dict[int, int] = {}
        for sequence in request.sequences.values():
            num_blocks = -(-sequence.num_computed_tokens // block_size)
            for table in sequence.block_tables:
                sequence.host_tables.append(
                    [self._host(block, host_block_of) for block in table.blocks[:num_blocks].tolist()]
                )
        for block, host_block in host_block_of.items():
            moves.swap_out(block, host_block)
        self.num_swapped_out += len(host_block_of)

    def free(self, sequence: Sequence) -> None:
        """The sequence needs its host blocks no more."""
        for table in sequence.host_tables:
            for host_block in table:
                if host_block != NO_BLOCK:
                    self._counts[host_block] -= 1
                    if self._counts[host_block] == 0:
                        self._free.append(host_block)
        sequence.host_tables = []

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        holders: Counter[int] = Counter()
        for sequence in sequences:
            for table in sequence.host_tables:
                holders.update(block for block in table if block != NO_BLOCK)
        assert sorted([*self._free, *holders]) == list(range(self.num_blocks)), "host blocks are lost or held twice"
        assert all(count == holders.get(block, 0) for block, count in enumerate(self._counts))

    def _host(self, block: int, host_block_of: dict[int, int]) -> int:
        if block == NO_BLOCK:
            return NO_BLOCK
        if block not in host_block_of:
            host_block_of[block] = self._free.pop()
        host_block = host_block_of[block]
        self._counts[host_block] += 1
        return host_block

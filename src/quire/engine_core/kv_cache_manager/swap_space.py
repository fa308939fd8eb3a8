"""Swap space (3.4.5): blocks in host memory for requests that gave way, with what they share still shared.

Owns the host blocks, their reference counts and what is known of their content: a prefix that several requests share
goes out once, also if they leave at different times. A request goes out whole or not at all, and comes back whole, into
whatever blocks the pool has then. Called by the KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.engine_core.block_table import NO_BLOCK
from quire.engine_core.kv_cache_manager.block_moves import BlockMoves
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.cache_changes import BlockKey
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.request import Request, Sequence


class SwapSpace:
    """Host blocks; at most as many as the pool has (3.4.5)."""

    def __init__(self, num_blocks: int, pool: BlockPool, moves: BlockMoves) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        self._moves = moves
        self._free = list(range(num_blocks - 1, -1, -1))
        # Nobody holds them, but the next step reads them, after it has filled others.
        self.late_releases: list[int] = []
        self._counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        # held host blocks by content
        self._host_block_by_key: dict[BlockKey, int] = {}

    @property
    def num_used(self) -> int:
        """Those that somebody holds."""
        return self.num_blocks - len(self._free) - len(self.late_releases)

    @property
    def free_blocks(self) -> list[int]:
        return self._free.copy()

    def has_room_for(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def knows(self, block: int) -> bool:
        """The block's content is here already."""
        key = self._pool.key_of(block)
        return key is not None and key in self._host_block_by_key

    def swap_out(self, request: Request, groups: Iterable[KVGroup], block_size: int) -> None:
        """Every computed block of the request gets a host block; the caller then frees the device's."""
        host_block_of: dict[int, int] = {}
        for sequence in request.sequences.values():
            for group, table in zip(groups, sequence.block_tables, strict=True):
                blocks = table.blocks[: group.num_blocks(sequence.num_computed_tokens, block_size)].tolist()
                sequence.host_tables.append([self._hold(block, host_block_of) for block in blocks])

    def forget(self, key: BlockKey) -> None:
        """Nobody else is to rely on that content."""
        host_block = self._host_block_by_key.pop(key, None)
        if host_block is not None:
            self._keys[host_block] = None

    def forget_all(self) -> None:
        for key in list(self._host_block_by_key):
            self.forget(key)

    def free(self, sequence: Sequence) -> None:
        """The sequence needs its host blocks no more."""
        for table in sequence.host_tables:
            for host_block in table:
                if host_block != NO_BLOCK:
                    self._release(host_block)
        sequence.host_tables = []

    def settle(self) -> None:
        """The moves have been handed to a step."""
        self._free += self.late_releases
        self.late_releases = []

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        holders = Counter(
            block for sequence in sequences for table in sequence.host_tables for block in table if block != NO_BLOCK
        )
        # by block that somebody holds: in a test, which checks after every step, few do
        assert self._counts.count(0) == self.num_blocks - len(holders), "host blocks: counts and holders differ"
        assert all(self._counts[block] == count for block, count in holders.items()), (
            "host blocks: counts and holders differ"
        )
        blocks = sorted([*self._free, *self.late_releases, *holders])
        assert blocks == list(range(self.num_blocks)), "host blocks are lost or held twice"
        named = list(self._host_block_by_key.values())
        keys = list(map(self._keys.__getitem__, named))
        assert keys == list(self._host_block_by_key), "host blocks: keys and blocks do not match"
        assert self._keys.count(None) == self.num_blocks - len(named), "a host block has a key that is not its own"
        assert holders.keys() >= set(named), "a free host block is known by content"

    def _hold(self, block: int, host_block_of: dict[int, int]) -> int:
        if block == NO_BLOCK:
            return NO_BLOCK
        if block not in host_block_of:
            host_block_of[block] = self._find_or_move(block)
        host_block = host_block_of[block]
        self._counts[host_block] += 1
        return host_block

    def _find_or_move(self, block: int) -> int:
        key = self._pool.key_of(block)
        if key is not None and key in self._host_block_by_key:
            return self._host_block_by_key[key]
        host_block = self._free.pop()
        self._moves.swap_out(block, host_block)
        if key is not None:
            self._keys[host_block] = key
            self._host_block_by_key[key] = host_block
        return host_block

    def _release(self, host_block: int) -> None:
        self._counts[host_block] -= 1
        if self._counts[host_block] == 0:
            key = self._keys[host_block]
            if key is not None:
                self.forget(key)
            (self.late_releases if self._moves.reads_host_block(host_block) else self._free).append(host_block)

"""The steady case, for many rows at once: each needs one fresh block, or has filled one that gets its name.

A decoding sequence comes here once in block_size steps (DESIGN: the hot path), and with a thousand of them many do in
each step. What is special in any way (shared blocks, windows, several groups, a pool that runs dry) is left to the
manager's general way; the results are the same. Owned and called by the KV cache manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.engine_core.request import Sequence
from quire.engine_core.rows import Rows
from quire.messages import IntArray

if TYPE_CHECKING:
    from quire.engine_core.kv_cache_manager.manager import KVCacheManager


class SteadyGrowth:
    """Only for one group without a window or a state, and without lookahead."""

    def __init__(self, manager: KVCacheManager, rows: Rows) -> None:
        self._manager = manager
        self._rows = rows
        self._is_simple = len(manager.groups) == 1 and not (manager.may_miss_siblings or manager.lookahead)

    def allocate(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """A block for each, whose next token begins one. False: nothing was done, because one of them is special."""
        manager = self._manager
        size = self._manager.block_size
        if not self._is_simple or len(sequences) > manager.pool.num_available:
            return False
        computed = self._rows.num_computed[rows]
        positions = (computed // size).tolist()
        # Behind the end of its table nothing is shared. An empty table is that of one that has to begin.
        is_plain = [
            0 < position == len(sequence.block_tables[0])
            for position, sequence in zip(positions, sequences, strict=True)
        ]
        if not all(is_plain):
            return False
        blocks = manager.pool.allocate(len(sequences))
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block_tables[0].append(block)
        manager.moves.write_one_each(rows, positions, blocks)
        self._rows.may_write(rows, (computed // size + 1) * size)
        return True

    def name(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """A name for the next block of each. False: nothing was done."""
        cache = self._manager.cache
        size = self._manager.block_size
        if not self._is_simple:
            return False
        num_named = self._rows.num_named[rows]
        counts = num_named.tolist()
        if not all(len(one.block_hashes) == count for one, count in zip(sequences, counts, strict=True)):
            return False
        content = self._rows.tokens[rows[:, None], (num_named * size)[:, None] + np.arange(size)].tobytes()
        cache.name_next(sequences, counts, content)
        self._rows.set_named(rows, num_named + 1)
        return True

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
        self._pool = manager.pool
        self._rows = rows
        self._is_simple = len(manager.groups) == 1 and not (manager.may_miss_siblings or manager.lookahead)

    def allocate(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """A block for each, whose next token begins one. False: nothing was done, because one of them is special."""
        manager = self._manager
        size = self._manager.block_size
        if not self._is_simple or len(sequences) > self._pool.num_available:
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
        blocks = self._pool.allocate(len(sequences))
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
        has_names = np.array([not one.is_unnamed for one in sequences])
        named = [one for one in sequences if not one.is_unnamed]
        counts = num_named[has_names].tolist()
        if not all(len(one.block_hashes) == count for one, count in zip(named, counts, strict=True)):
            return False
        places = (num_named[has_names] * size)[:, None] + np.arange(size)
        content = self._rows.tokens[rows[has_names, None], places].tobytes()
        cache.name_next(named, counts, content)
        self._rows.set_named(rows, num_named + 1)
        return True

    # ------------------------------------------------------------------------------------------ many steps (leap.py)

    def num_steps_with_blocks(self, rows: IntArray, sequences: list[Sequence], num_steps: int) -> int:
        """In so many steps of one token for each of these, at most num_steps, every block that is needed can be had and
        is a fresh one. 0: one of them is special."""
        size = self._manager.block_size
        if not self._is_simple:
            return 0
        ends = np.array([len(sequence.block_tables[0]) * size for sequence in sequences])
        until = self._rows.writable_until[rows]
        if np.count_nonzero(until != ends) or not self._are_named(rows, sequences):
            return 0
        available = self._pool.num_available
        if len(rows) * (num_steps // size + 1) <= available:
            return num_steps
        room = until - self._rows.num_computed[rows]
        while num_steps and int(_num_blocks(num_steps - room, size).sum()) > available:
            num_steps //= 2
        return num_steps

    def advance(self, rows: IntArray, sequences: list[Sequence], num_steps: int) -> IntArray:
        """Blocks and names that so many steps take, in the order in which the steps would; the rows have their tokens
        and numbers by now. Blocks that are held after each step."""
        size = self._manager.block_size
        computed = self._rows.num_computed[rows] - num_steps
        until = self._rows.writable_until[rows]
        num_new = _num_blocks(computed + num_steps - until, size)
        ends = num_new.cumsum()
        which = np.arange(len(rows)).repeat(num_new)
        within = np.arange(len(which)) - (ends - num_new).repeat(num_new)
        # counted from the first of these steps
        taken_in = (until - computed)[which] + within * size
        held = self._pool.num_held + np.bincount(taken_in, minlength=num_steps).cumsum()
        self._rows.may_write(rows, until + num_new * size)
        if not all(sequence.is_unnamed for sequence in sequences):
            self._take_and_name(rows, sequences, computed, which, taken_in)
        elif len(which):
            blocks = np.array(self._pool.allocate(len(which)))
            start = 0
            for sequence, end in zip(sequences, ends.tolist(), strict=True):
                if end > start:
                    sequence.block_tables[0].extend(blocks[start:end])
                    start = end
        self._rows.set_named(rows, np.maximum(self._rows.num_named[rows], (computed + num_steps) // size))
        return held

    def _take_and_name(
        self, rows: IntArray, sequences: list[Sequence], computed: IntArray, which: IntArray, taken_in: IntArray
    ) -> None:
        """One block after the other: what an allocation gives up may be what a name was about to be given to."""
        manager = self._manager
        size = manager.block_size
        events = [(step, 0, number) for step, number in zip(taken_in.tolist(), which.tolist(), strict=True)]
        named = self._rows.num_named[rows].tolist()
        reached = self._rows.num_computed[rows].tolist()
        for number, (start, first, last) in enumerate(zip(computed.tolist(), named, reached, strict=True)):
            if sequences[number].is_unnamed:
                continue
            events += [((block + 1) * size - 1 - start, 1, number) for block in range(first, last // size)]
        for _, is_name, number in sorted(events):
            sequence = sequences[number]
            if not is_name:
                sequence.block_tables[0].append(manager.pool.allocate(1)[0])
                continue
            index = named[number]
            content = self._rows.tokens[rows[number], index * size : (index + 1) * size].tobytes()
            manager.cache.name_next([sequence], [index], content)
            named[number] = index + 1

    def _are_named(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """As far as they are computed."""
        named = self._rows.num_named[rows]
        if np.count_nonzero(named < self._rows.num_computed[rows] // self._manager.block_size):
            return False
        lengths = zip(sequences, named.tolist(), strict=True)
        return not any(not one.is_unnamed and len(one.block_hashes) != length for one, length in lengths)


def _num_blocks(num_tokens: IntArray, block_size: int) -> IntArray:
    """That so many tokens need beyond what there is room for."""
    return np.maximum(-(-num_tokens // block_size), 0)

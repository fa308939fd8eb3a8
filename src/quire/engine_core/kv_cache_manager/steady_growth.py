"""The steady case, for many rows at once: each needs one fresh block, or has filled one that gets its name.

A decoding sequence comes here once in block_size steps (DESIGN: the hot path), and with a thousand of them many do in
each step. What is special in any way (shared blocks, windows, several groups, a pool that runs dry) is left to the
manager's general way; the results are the same. Owned and called by the KV cache manager.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from quire.engine_core.request import Sequence
from quire.engine_core.rows import Rows
from quire.messages import NO_INTS, IntArray

if TYPE_CHECKING:
    from quire.engine_core.kv_cache_manager.manager import KVCacheManager


class SteadyGrowth:
    """Only for one group without a window or a state, and without lookahead."""

    def __init__(self, manager: KVCacheManager, rows: Rows) -> None:
        self._manager = manager
        self._pool = manager.pool
        self._moves = manager.moves
        self._rows = rows
        self.block_size = manager.block_size
        self.is_simple = len(manager.groups) == 1 and not (manager.may_miss_siblings or manager.lookahead)

    def allocate(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """A block for each, whose next token begins one. False: nothing was done, because one of them is special."""
        size = self.block_size
        if not self.is_simple or len(sequences) > self._pool.num_available:
            return False
        computed = self._rows.num_computed[rows]
        positions = (computed // size).tolist()
        # Behind the end of its table nothing is shared. An empty table is that of one that has to begin.
        is_plain = [
            0 < position == sequence.block_tables[0].length
            for position, sequence in zip(positions, sequences, strict=True)
        ]
        if not all(is_plain):
            return False
        blocks = self._pool.allocate(len(sequences))
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block_tables[0].append(block)
        self._moves.write_one_each(rows, positions, blocks)
        self._rows.may_write(rows, (computed // size + 1) * size)
        return True

    def name(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """A name for the next block of each. False: nothing was done."""
        cache = self._manager.cache
        size = self.block_size
        if not self.is_simple:
            return False
        num_named = self._rows.num_named[rows]
        has_names = np.array([not one.is_unnamed for one in sequences])
        named = [one for one in sequences if not one.is_unnamed]
        counts = num_named[has_names].tolist()
        if [len(one.block_hashes) for one in named] != counts:
            return False
        places = (num_named[has_names] * size)[:, None] + np.arange(size)
        content = self._rows.tokens[rows[has_names, None], places].tobytes()
        cache.name_next(named, counts, content)
        self._rows.set_named(rows, num_named + 1)
        return True

    # ------------------------------------------------------------------------------------------ many steps (leap.py)

    def steps_with_blocks(self, rows: IntArray, sequences: list[Sequence], steps: IntArray) -> IntArray:
        """Of so many steps of one token for each of these as many as find every block that is needed, a fresh one each,
        whoever ends meanwhile. Nothing: one of them is special."""
        size = self.block_size
        if not self.is_simple:
            return NO_INTS
        ends = np.array([len(sequence.block_tables[0]) * size for sequence in sequences])
        until = self._rows.writable_until[rows]
        if np.count_nonzero(until != ends) or not self._are_named(rows, sequences):
            return NO_INTS
        available = self._pool.num_available
        num_steps = int(steps.max())
        if len(rows) * (num_steps // size + 1) <= available:
            return steps
        # all but the last token of each is computed, or is in the first of these steps
        room = until - self._rows.num_known[rows] + 1
        while num_steps and int(_num_blocks(np.minimum(steps, num_steps) - room, size).sum()) > available:
            num_steps //= 2
        return np.minimum(steps, num_steps) if num_steps else NO_INTS

    def allocate_rest(self, sequence: Sequence) -> None:
        """Blocks for what is left of a prompt; they are there, and get no names."""
        is_there = self._manager.allocate_slots(sequence, sequence.num_total_tokens - sequence.num_computed_tokens)
        assert is_there, "who joins was certain to find its blocks"
        self._moves.drop_writes(sequence.row)

    def grow(self, row: int, sequence: Sequence, num_steps: int) -> range:
        """The same for one whose blocks get no names, at once: in which of its steps, from the first on, it takes a
        block each."""
        size = self.block_size
        reached = int(self._rows.num_computed[row])
        until = int(self._rows.writable_until[row])
        num_new = max(0, -(-(reached - until) // size))
        if num_new:
            sequence.block_tables[0].extend(self._pool.allocate(num_new))
            self._rows.may_write(row, until + num_new * size)
        self._rows.set_named(row, reached // size)
        first = until - (reached - num_steps)
        return range(first, first + num_new * size, size)

    def growth(self, rows: IntArray, sequences: list[Sequence], steps: IntArray) -> Growth:
        """Of so many steps of each; the rows have their tokens and numbers by now."""
        return Growth(self._manager, self._rows, rows, sequences, steps)

    def _are_named(self, rows: IntArray, sequences: list[Sequence]) -> bool:
        """As far as they are computed."""
        named = self._rows.num_named[rows]
        if np.count_nonzero(named < self._rows.num_computed[rows] // self.block_size):
            return False
        lengths = zip(sequences, named.tolist(), strict=True)
        return not any(not one.is_unnamed and len(one.block_hashes) != length for one, length in lengths)


class Growth:
    """Blocks and names that steps of one token a row take, in the order in which the steps would. Rows may be in
    different numbers of steps, all of them from the first on."""

    def __init__(
        self, manager: KVCacheManager, numbers: Rows, rows: IntArray, sequences: list[Sequence], steps: IntArray
    ) -> None:
        self._pool = manager.pool
        self._cache = manager.cache
        self._block_size = manager.block_size
        self._sequences = sequences
        self._tokens = numbers.tokens
        self._rows = rows
        size = manager.block_size
        reached = numbers.num_computed[rows]
        start = reached - steps
        until = numbers.writable_until[rows]
        num_new = _num_blocks(reached - until, size)
        ends = num_new.cumsum()
        self._which = np.arange(len(rows)).repeat(num_new)
        within = np.arange(len(self._which)) - (ends - num_new).repeat(num_new)
        # counted from the first of these steps
        taken_in = (until - start)[self._which] + within * size
        # blocks, in each step
        self.taken = np.bincount(taken_in)
        self._events: list[tuple[int, int, int]] = []
        self._num_made = 0
        # nobody looks for what has no name: all blocks at once
        self.are_named = not all(sequence.is_unnamed for sequence in sequences)
        self._ends = [] if self.are_named else ends.tolist()
        named = numbers.num_named[rows]
        if self.are_named:
            self._named = named.tolist()
            self._events = self._ordered(start, reached, taken_in)
        numbers.may_write(rows, until + num_new * size)
        numbers.set_named(rows, np.maximum(named, reached // size))

    def _ordered(self, start: IntArray, reached: IntArray, taken_in: IntArray) -> list[tuple[int, int, int]]:
        """(step, whether it is a name, whose): a step takes blocks, then gives names."""
        size = self._block_size
        events = [(step, 0, number) for step, number in zip(taken_in.tolist(), self._which.tolist(), strict=True)]
        numbers = zip(start.tolist(), self._named, reached.tolist(), strict=True)
        for number, (first_token, first, end) in enumerate(numbers):
            if not self._sequences[number].is_unnamed:
                events += [((block + 1) * size - 1 - first_token, 1, number) for block in range(first, end // size)]
        return sorted(events)

    def make(self, num_steps: int) -> None:
        """Those of the first so many steps that are not made yet, and maybe of later ones."""
        if not self.are_named:
            self._take_all()
            return
        # one after the other: what an allocation gives up may be what a name was about to be given to
        size = self._block_size
        for _, is_name, number in self._events[self._num_made : bisect_left(self._events, (num_steps,))]:
            self._num_made += 1
            sequence = self._sequences[number]
            if not is_name:
                sequence.block_tables[0].append(self._pool.allocate(1)[0])
                continue
            index = self._named[number]
            content = self._tokens[self._rows[number], index * size : (index + 1) * size].tobytes()
            self._cache.name_next([sequence], [index], content)
            self._named[number] = index + 1

    def _take_all(self) -> None:
        ends, self._ends = self._ends, []
        if not ends or not ends[-1]:
            return
        blocks = np.array(self._pool.allocate(ends[-1]))
        start = 0
        for sequence, end in zip(self._sequences, ends, strict=True):
            if end > start:
                sequence.block_tables[0].extend(blocks[start:end])
                start = end


def _num_blocks(num_tokens: IntArray, block_size: int) -> IntArray:
    """That so many tokens need beyond what there is room for."""
    return np.maximum(-(-num_tokens // block_size), 0)

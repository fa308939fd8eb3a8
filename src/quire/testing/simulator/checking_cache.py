"""A KV cache that remembers what was written into it, and by which prefix.

A cell holds the hash of the whole prefix up to its token. "Attention" compares every cell that a block table names with
what must be there. So a block that is shared wrongly, reused too early, not copied, swapped to the wrong place or
cached before it is written is noticed at the first read; nothing is judged by its text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray
from quire.testing.simulator.checking_model import Hashes

# In a cell that nobody has written. No prefix has this hash, as far as chance goes.
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
# In one that a failed row was to write, and that holds whatever was there: this and the number of the step.
_HOLE = 0xFA11_ED00_0000_0000


class CheckingCache:
    """Cells of blocks on the device and in swap space. Raises AssertionError; knows no rows."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        # one cell more than there are slots: what a position without a block reads
        self._slots = np.full(num_blocks * block_size + 1, POISON, dtype=np.uint64)
        self._blocks = self._slots[:-1].reshape(num_blocks, block_size)
        self._host = np.full((num_host_blocks, block_size), POISON, dtype=np.uint64)
        # the one that runs
        self.step = 0

    def move(self, swapped_out: IntArray, swapped_in: IntArray, copies: IntArray) -> None:
        """What a step does to whole blocks, in its order: out, in, then all copies at once."""
        if swapped_out.size:
            sources, targets = swapped_out
            _assert_distinct(targets, "two blocks are swapped out to one host block")
            self._host[targets] = self._blocks[sources]
        if swapped_in.size:
            sources, targets = swapped_in
            _assert_distinct(targets, "two host blocks are swapped into one block")
            self._blocks[targets] = self._host[sources]
        if copies.size:
            sources, targets = copies
            _assert_distinct(targets, "two copies into one block")
            assert not set(sources.tolist()) & set(targets.tolist()), "a block is copied and overwritten in one step"
            self._blocks[targets] = self._blocks[sources]

    def write(self, slots: IntArray, hashes: Hashes) -> None:
        """New cells. Who writes a block's first slot has it anew: what the block held before is gone."""
        assert not np.count_nonzero(slots < 0), "a token is computed at a position that has no block"
        offsets = slots % self._block_size
        if np.count_nonzero(offsets) < offsets.size:
            self._blocks[slots[offsets == 0] // self._block_size] = POISON
        self._slots[slots] = hashes

    def leave_holes(self, slots: IntArray) -> None:
        """These were to be written, and are not."""
        self._slots[slots] = _HOLE + self.step

    def are_fresh_holes(self, cells: Hashes) -> npt.NDArray[np.bool_]:
        """Left in this step, or in the one before: its failure was not known when this one was decided (4.6.1)."""
        is_fresh: npt.NDArray[np.bool_] = (cells == _HOLE + self.step) | (cells == _HOLE + self.step - 1)
        return is_fresh

    def read(self, slots: IntArray) -> Hashes:
        hashes: Hashes = self._slots[slots]
        return hashes

    def blocks_at(self, blocks: IntArray) -> Hashes:
        """A copy of what whole blocks hold."""
        cells: Hashes = self._blocks[blocks]
        return cells

    def set_blocks(self, blocks: IntArray, cells: Hashes) -> None:
        self._blocks[blocks] = cells

    def poison(self, blocks: Iterable[int], host_blocks: Iterable[int] = ()) -> None:
        """Nobody may count on these any more."""
        self._blocks[list(blocks)] = POISON
        on_host = list(host_blocks)
        if on_host:
            self._host[on_host] = POISON

    def spoil(self, block: int, offset: int) -> None:
        """One wrong cell, for tests of the check itself."""
        self._blocks[block, offset] ^= np.uint64(1)


def _assert_distinct(blocks: IntArray, message: str) -> None:
    assert len(set(blocks.tolist())) == len(blocks), message

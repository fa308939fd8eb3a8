"""The rows of the simulated worker: what a worker keeps of each sequence, as arrays over rows.

Applies the differences of a SchedulerOutput. The arrays grow as rows and lengths are named, so nothing has to be known
beforehand.
"""

from __future__ import annotations

import numpy as np

from quire.messages import AdmittedSequence, AppendedTokens, ForkedSequence, IntArray
from quire.pooling_params import MEAN
from quire.testing.simulator.checking_model import EMPTY_PREFIX, Floats, Hashes, extended, prefix_hashes

# A position that has no block. As an index it names the last cell of the cache, which holds nothing.
NO_SLOT = -1
_MASK = (1 << 64) - 1


class SimulatedRows:
    """Two numbers, hashes of all prefixes and block tables by row."""

    def __init__(self, num_groups: int, block_size: int, num_state_blocks: int = 0) -> None:
        """So many groups keep tokens; one more keeps states, if they have blocks."""
        self._block_size = block_size
        self._offsets = np.arange(block_size)
        self.num_computed: IntArray = np.zeros(0, dtype=np.int64)
        self.num_total: IntArray = np.zeros(0, dtype=np.int64)
        # of the tokens, so many at the end are drafts that were not verified yet
        self.num_drafts: IntArray = np.zeros(0, dtype=np.int64)
        self.num_candidates: IntArray = np.zeros(0, dtype=np.int64)
        self.seeds: Hashes = np.zeros(0, dtype=np.uint64)
        self.temperatures: Floats = np.zeros(0)
        self.is_greedy = np.zeros(0, dtype=np.bool_)
        self.is_final = np.zeros(0, dtype=np.bool_)
        self.is_used = np.zeros(0, dtype=np.bool_)
        # its prompt becomes a vector
        self.is_pooled = np.zeros(0, dtype=np.bool_)
        # of a row that takes a mean: positions whose states it has seen; -1 for all others
        self.num_summed: IntArray = np.zeros(0, dtype=np.int64)
        # its answer was an error; the core hears of it later
        self.has_failed = np.zeros(0, dtype=np.bool_)
        # it has computed all it has since it was admitted, and its next token was not there yet
        self.is_late = np.zeros(0, dtype=np.bool_)
        # [row, i]: the hash of the first i tokens
        self.hashes: Hashes = np.zeros((0, 1), dtype=np.uint64)
        # of rows with states: tokens that these have taken in, and that were written before drafts were looked at
        self.num_absorbed: IntArray = np.zeros(0, dtype=np.int64)
        self.num_written: IntArray = np.zeros(0, dtype=np.int64)
        # it begins, in this step, with drafts that were right
        self.computes_again = np.zeros(0, dtype=np.bool_)
        # [row, index in the block table]
        self.state_blocks: IntArray = np.zeros((0, num_state_blocks), dtype=np.int64)
        # [group, row, index in the block table, offset]: the slots of each block
        self._tables: IntArray = np.zeros((num_groups, 0, 0, block_size), dtype=np.int64)

    @property
    def slots(self) -> IntArray:
        """[group, row, position]: the block tables, unrolled."""
        num_groups, num_rows, width, _ = self._tables.shape
        return self._tables.reshape(num_groups, num_rows, width * self._block_size)

    def blocks_of(self, rows: IntArray) -> list[int]:
        """All that stand in the tables of these rows."""
        slots = self._tables[:, rows, :, 0]
        found: list[int] = (slots[slots >= 0] // self._block_size).tolist()
        return found

    # ------------------------------------------------------------------------------------------ who is there

    def fork(self, fork: ForkedSequence) -> None:
        """The whole row of the parent, tables included; it may overwrite what is left of an earlier sequence."""
        self._reserve_rows(fork.row + 1)
        parent, child = fork.parent_row, fork.row
        assert self.is_used[parent], f"row {parent} forks, but nobody is there"
        num_verified = self.num_total[parent] - self.num_drafts[parent]
        assert fork.num_total_tokens <= num_verified, "a child has more tokens than its parent"
        for column in (self.num_candidates, self.temperatures, self.is_greedy, self.is_final, self.hashes):
            column[child] = column[parent]
        self._tables[:, child] = self._tables[:, parent]
        self.state_blocks[child] = self.state_blocks[parent]
        self.num_written[child] = 0
        self.is_used[child] = True
        self.has_failed[child] = self.is_late[child] = self.is_pooled[child] = False
        self.num_drafts[child] = 0
        self.num_summed[child] = -1
        self.num_total[child] = fork.num_total_tokens
        self.num_computed[child] = fork.num_computed_tokens
        self.seeds[child] = fork.seed & _MASK

    def release(self, row: int) -> None:
        assert self.is_used[row], f"row {row} is released, but nobody is there"
        self.is_used[row] = False

    def admit(self, admitted: AdmittedSequence) -> None:
        row, count = admitted.row, len(admitted.token_ids)
        self._reserve_rows(row + 1)
        self.reserve_tokens(count + 1)
        assert not self.is_used[row], f"row {row} is still used"
        assert admitted.num_computed_tokens < max(1, count), "nothing is left to compute"
        self.is_used[row] = True
        self.has_failed[row] = self.is_late[row] = False
        self.num_drafts[row] = 0
        self.hashes[row, 0] = EMPTY_PREFIX
        self.hashes[row, 1 : count + 1] = prefix_hashes(admitted.token_ids.tolist())
        self._tables[:, row] = NO_SLOT
        self.state_blocks[row] = NO_SLOT
        self.num_written[row] = 0
        self.num_total[row] = count
        self.num_computed[row] = admitted.num_computed_tokens
        self.num_candidates[row] = admitted.num_candidates
        self.seeds[row] = admitted.seed & _MASK
        self.temperatures[row] = admitted.sampling.temperature
        self.is_greedy[row] = admitted.sampling.is_greedy
        self.is_final[row] = admitted.is_final
        self.is_pooled[row] = bool(admitted.pooling)
        self.num_summed[row] = 0 if admitted.pooling == MEAN else -1

    def set_progress(self, row: int, num_computed_tokens: int) -> None:
        assert self.is_used[row], f"progress of row {row}, but nobody is there"
        self.num_computed[row] = num_computed_tokens
        self.num_written[row] = 0
        self.is_late[row] = False

    # ------------------------------------------------------------------------------------------ tokens and blocks

    def append_chosen(self, appended: AppendedTokens) -> None:
        """Tokens that the core chose."""
        row, count = appended.row, len(appended.token_ids)
        assert self.is_used[row], f"tokens for row {row}, but nobody is there"
        assert not self.num_drafts[row], f"tokens for row {row} behind drafts"
        total = int(self.num_total[row])
        self.reserve_tokens(total + count + 1)
        self.hashes[row, total + 1 : total + count + 1] = prefix_hashes(
            appended.token_ids, int(self.hashes[row, total])
        )
        self.num_total[row] += count
        self.is_final[row] = appended.is_final

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """One sampled token for each row."""
        totals = self.num_total[rows]
        self.reserve_tokens(max(totals.tolist()) + 2)
        longer = totals + 1
        self.hashes[rows, longer] = extended(self.hashes[rows, totals], token_ids)
        self.num_total[rows] = longer

    def see(self, rows: IntArray, starts: IntArray, ends: IntArray) -> None:
        """A mean is of all positions of a prompt, and of those that a cache brings no worker sees the states."""
        summed = self.num_summed[rows]
        if not np.count_nonzero(summed >= 0):
            return
        assert (starts[summed >= 0] <= summed[summed >= 0]).all(), "a mean lacks positions that were not computed"
        self.num_summed[rows] = np.where(summed >= 0, np.maximum(summed, ends), -1)

    def last_hashes(self, rows: IntArray) -> Hashes:
        hashes: Hashes = self.hashes[rows, self.num_total[rows]]
        return hashes

    def set_blocks(self, block_writes: IntArray) -> None:
        if not block_writes.size:
            return
        groups, rows, indices, blocks = block_writes
        self._reserve_rows(max(rows.tolist()) + 1)
        if self.state_blocks.shape[1]:
            is_state = groups == len(self._tables)
            self.state_blocks[rows[is_state], indices[is_state]] = blocks[is_state]
            groups, rows, indices, blocks = block_writes[:, ~is_state]
            # what lay behind its computed tokens did not come along when it gave way
            np.minimum.at(self.num_written, rows, indices * self._block_size)
        width, there = max(indices.tolist(), default=-1) + 1, self._tables.shape[2]
        if width > there:
            more = max(width, 2 * there) - there
            self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, more), (0, 0)), constant_values=NO_SLOT)
        self._tables[groups, rows, indices] = blocks[:, None] * self._block_size + self._offsets
        self.is_late[rows] = False

    # ------------------------------------------------------------------------------------------ room

    def _reserve_rows(self, count: int) -> None:
        there = len(self.num_total)
        if count <= there:
            return
        more = max(count, 2 * there) - there
        numbers = (
            "num_computed",
            "num_total",
            "num_drafts",
            "num_candidates",
            "num_summed",
            "num_absorbed",
            "num_written",
        )
        for name in (*numbers, "seeds", "temperatures"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        for name in ("is_greedy", "is_final", "is_used", "has_failed", "is_late", "is_pooled", "computes_again"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.hashes = np.pad(self.hashes, ((0, more), (0, 0)))
        self.state_blocks = np.pad(self.state_blocks, ((0, more), (0, 0)), constant_values=NO_SLOT)
        self._tables = np.pad(self._tables, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=NO_SLOT)

    def reserve_tokens(self, count: int) -> None:
        there = self.hashes.shape[1]
        if count > there:
            self.hashes = np.pad(self.hashes, ((0, 0), (0, max(count, 2 * there) - there)))

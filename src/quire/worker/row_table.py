"""The worker's side of the rows: tokens, the two numbers (4.4.2) and block tables of every sequence, as arrays.

Owns this state and changes it only by the differences that a SchedulerOutput carries and by what a step computed
(4.6.2, incremental updates). Never rebuilt, never copied whole, no object per sequence. Called by ModelRunner; the
sampler and its processors read it.

    row      token_ids [rows, max_model_len + 1]    num_computed  num_total     block_tables [groups, rows, blocks]
     0       11 42 7 99 . . . . . . . . . .               3           4           g0: 5 9 . . .
     1       . . . . . . . . . . . . . . .                0           0  (free)       . . . . .
     2       3 1 4 1 5 9 2 6 . . . . . . .                4           8               2 . . . .
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.messages import AdmittedSequence, AppendedTokens, ForkedSequence, IntArray
from quire.worker.lazy_memory import lazy_zeros


class RowTable:
    """Arrays over rows; what a released row holds is overwritten by the next sequence."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.num_rows = num_rows
        # one more than a sequence may have: the token sampled from a full one still has a place
        self.token_ids = lazy_zeros((num_rows, max_model_len + 1), np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_total = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        self.is_final = np.zeros(num_rows, dtype=np.bool_)
        self.is_used = np.zeros(num_rows, dtype=np.bool_)
        self.block_tables = lazy_zeros((0, num_rows, 0), np.int32)
        self._num_blocks = 0

    def open_groups(self, num_groups: int, blocks_per_row: int, num_blocks: int) -> None:
        """Block tables for so many groups; called once, when the cache is there."""
        self.block_tables = lazy_zeros((num_groups, self.num_rows, blocks_per_row), np.int32)
        self._num_blocks = num_blocks

    # ------------------------------------------------------------------------------------------ differences

    def release(self, row: int) -> None:
        self.is_used[row] = False

    def admit(self, sequence: AdmittedSequence) -> None:
        row, num_tokens = sequence.row, len(sequence.token_ids)
        self.token_ids[row, :num_tokens] = sequence.token_ids
        self.num_computed[row] = sequence.num_computed_tokens
        self.num_total[row] = num_tokens
        self.num_prompt[row] = sequence.num_prompt_tokens
        self.is_final[row] = sequence.is_final
        self.is_used[row] = True

    def fork(self, fork: ForkedSequence) -> None:
        """Everything of a row is written: nothing need have said that its last sequence is gone."""
        parent, row, num_tokens = fork.parent_row, fork.row, fork.num_total_tokens
        assert num_tokens <= self.num_total[parent], "a child has more tokens than its parent"
        self.token_ids[row, :num_tokens] = self.token_ids[parent, :num_tokens]
        # Whole rows: where a table ends is known to the core alone, and block ids after it do no harm.
        self.block_tables[:, row] = self.block_tables[:, parent]
        self.num_computed[row] = fork.num_computed_tokens
        self.num_total[row] = num_tokens
        self.num_prompt[row] = min(self.num_prompt[parent], num_tokens)
        self.is_final[row] = self.is_final[parent]
        self.is_used[row] = True

    def set_progress(self, progress: Sequence[tuple[int, int]]) -> None:
        if progress:
            rows, num_computed = np.array(progress, dtype=np.int64).T
            self.num_computed[rows] = num_computed

    def extend(self, appended: AppendedTokens) -> None:
        row, num_tokens = appended.row, len(appended.token_ids)
        start = int(self.num_total[row])
        self.token_ids[row, start : start + num_tokens] = appended.token_ids
        self.num_total[row] += num_tokens
        if not self.is_final[row]:  # 4.4.4, streaming prefill: what arrives before the end of the input is prompt
            self.num_prompt[row] += num_tokens
        self.is_final[row] = appended.is_final

    def write_blocks(self, block_writes: IntArray) -> None:
        groups, rows, indices, block_ids = block_writes
        self.block_tables[groups, rows, indices] = block_ids

    # ------------------------------------------------------------------------------------------ what a step computed

    def advance(self, rows: IntArray, num_tokens: IntArray) -> None:
        self.num_computed[rows] += num_tokens

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """One sampled token for each row; a row occurs once."""
        self.token_ids[rows, self.num_total[rows]] = token_ids
        self.num_total[rows] += 1

    def check_invariants(self) -> None:
        used = np.flatnonzero(self.is_used)
        total = self.num_total[used]
        assert (self.num_computed[used] >= 0).all()
        assert (self.num_computed[used] <= total).all(), "computed more tokens than there are"
        assert (self.num_prompt[used] <= total).all(), "the prompt is longer than the sequence"
        assert (total <= self.token_ids.shape[1]).all(), "a sequence is longer than its row"
        for row, num_tokens in zip(used.tolist(), total.tolist(), strict=True):
            assert (self.token_ids[row, :num_tokens] >= 0).all(), f"row {row} has a token below 0"
            blocks = self.block_tables[:, row]
            assert ((blocks >= 0) & (blocks < max(1, self._num_blocks))).all(), f"row {row} has a block out of range"

"""The worker's side of the rows: tokens, the two numbers (4.4.2) and block tables of every sequence, as arrays.

Owns this state and changes it only by the differences that a SchedulerOutput carries and by what a step computed
(4.6.2, incremental updates). Never rebuilt, never copied whole, no object per sequence. Called by ModelRunner; the
sampler and its processors read it.

    row      token_ids [rows, max_model_len + 1]    num_computed  num_total     block_tables [groups, rows, blocks]
     0       11 42 7 99 . . . . . . . . . .               3           4           g0: 5 9 . . .
     1       . . . . . . . . . . . . . . .                0           0  (free)       . . . . .
     2       3 1 4 1 5 9 2 6 . . . . . . .                4           8               2 . . . .

The last num_drafts tokens of a row are guesses that nobody has verified: they count in num_total, and at least one
token before them is not computed. Steps verify them from the first on; a wrong one takes those after it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.messages import AdmittedSequence, AppendedTokens, ForkedSequence, IntArray
from quire.worker.lazy_memory import lazy_zeros

# where nobody says how many tokens there are
_ANY_TOKEN = 1 << 31
# of tokens that end a row; one with more of them gets a token a step
_MOST_STOPS = 8


class RowTable:
    """Arrays over rows; what a released row holds is overwritten by the next sequence."""

    def __init__(self, num_rows: int, max_model_len: int, vocab_size: int = _ANY_TOKEN) -> None:
        self.num_rows = num_rows
        self._vocab_size = vocab_size
        # one more than a sequence may have: the token sampled from a full one still has a place
        self.token_ids = lazy_zeros((num_rows, max_model_len + 1), np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_total = np.zeros(num_rows, dtype=np.int64)
        self.num_drafts = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        # For steps in which rows get several tokens: where each row ends at the latest, which tokens end it (-1: none),
        # and whether nobody reads them before the last. The core has the last word of ends; here they say where more
        # tokens would be in vain. A row with more stops than there is room for gets one token a step: its most is 0.
        self.most_total = np.zeros(num_rows, dtype=np.int64)
        self.stops = np.full((num_rows, _MOST_STOPS), -1, dtype=np.int32)
        self.in_bursts = np.zeros(num_rows, dtype=np.bool_)
        self.is_final = np.zeros(num_rows, dtype=np.bool_)
        # False: its prompt becomes a vector (pooling.py)
        self.samples = np.ones(num_rows, dtype=np.bool_)
        self.is_used = np.zeros(num_rows, dtype=np.bool_)
        # True: the keys and values of the next token lie in the row's blocks already. They are not written again,
        # because by now others may hold these blocks.
        self.is_written = np.zeros(num_rows, dtype=np.bool_)
        # numbers of the adapters that rows are computed with, 0 for none, and the slots in which these are, -1 for none
        self.adapters = np.zeros(num_rows, dtype=np.int64)
        self.adapter_slots = np.full(num_rows, -1, dtype=np.int32)
        self.block_tables = lazy_zeros((0, num_rows, 0), np.int32)
        # A block that the window has passed stays in the table, and may be somebody else's by then.
        self.windows: tuple[int, ...] = ()
        self.num_attention_groups = 0
        # entries of a row in the last table, if that one is of recurrent states
        self.num_state_blocks = 0
        self._num_blocks = 0
        # Numbers of the entries of block tables that were written since they were taken, if anybody takes them.
        self.notes_changes = False
        self._changes: list[IntArray] = []

    def open_groups(
        self,
        num_groups: int,
        blocks_per_row: int,
        num_blocks: int,
        windows: Sequence[int] = (),
        num_state_blocks: int = 0,
    ) -> None:
        """Block tables for so many groups; called once, when the cache is there. `windows`: how many tokens the layers
        of each group look back; 0: at all. `num_state_blocks`: of the last group, which holds recurrent states; 0:
        there is no such group."""
        blocks_per_row = max(blocks_per_row, num_state_blocks)
        self.block_tables = lazy_zeros((num_groups, self.num_rows, blocks_per_row), np.int32)
        self.num_attention_groups = num_groups - (num_state_blocks > 0)
        self.num_state_blocks = num_state_blocks
        self.windows = tuple(windows) or (0,) * self.num_attention_groups
        self._num_blocks = num_blocks

    # ------------------------------------------------------------------------------------------ differences

    def release(self, row: int) -> None:
        self.is_used[row] = False

    def admit(self, sequence: AdmittedSequence) -> None:
        row = sequence.row
        num_tokens = len(sequence.token_ids)
        self.token_ids[row, :num_tokens] = sequence.token_ids
        self.num_computed[row] = sequence.num_computed_tokens
        self.num_total[row] = num_tokens
        self.num_drafts[row] = 0
        self.num_prompt[row] = sequence.num_prompt_tokens
        self._set_ends(sequence)
        self.in_bursts[row] = sequence.in_bursts
        self.is_final[row] = sequence.is_final
        self.samples[row] = not sequence.pooling
        self.adapters[row] = sequence.adapter
        self.adapter_slots[row] = -1
        self.is_used[row] = True
        self.is_written[row] = False

    def _set_ends(self, sequence: AdmittedSequence) -> None:
        row, sampling = sequence.row, sequence.sampling
        named = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else sequence.eos_token_ids)}
        stops = [token for token in named if 0 <= token < _ANY_TOKEN]
        most = longest = self.token_ids.shape[1] - 1
        if sampling.max_tokens is not None:
            most = min(sequence.num_prompt_tokens + sampling.max_tokens, longest)
        self.most_total[row] = most if len(stops) <= _MOST_STOPS else 0
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops[:_MOST_STOPS]

    def fork(self, fork: ForkedSequence) -> None:
        """Everything of a row is written: nothing need have said that its last sequence is gone."""
        parent = fork.parent_row
        row = fork.row
        num_tokens = fork.num_total_tokens
        assert num_tokens <= self.num_total[parent], "a child has more tokens than its parent"
        self.token_ids[row, :num_tokens] = self.token_ids[parent, :num_tokens]
        # Whole rows: where a table ends is known to the core alone, and block ids after it do no harm.
        self.block_tables[:, row] = self.block_tables[:, parent]
        if self.notes_changes:
            num_groups, num_rows, width = self.block_tables.shape
            starts = (np.arange(num_groups) * num_rows + row) * width
            self._changes.append((starts[:, None] + np.arange(width)).reshape(-1))
        self.num_computed[row] = fork.num_computed_tokens
        self.num_total[row] = num_tokens
        # what the child has of the parent's drafts is as little verified
        self.num_drafts[row] = max(0, num_tokens - int(self.num_verified(parent)))
        self.num_prompt[row] = min(self.num_prompt[parent], num_tokens)
        self.most_total[row] = self.most_total[parent]
        self.stops[row] = self.stops[parent]
        self.in_bursts[row] = self.in_bursts[parent]
        self.is_final[row] = self.is_final[parent]
        self.samples[row] = self.samples[parent]
        self.adapters[row] = self.adapters[parent]
        self.adapter_slots[row] = self.adapter_slots[parent]
        self.is_used[row] = True
        self.is_written[row] = False

    def set_progress(self, progress: Sequence[tuple[int, int]]) -> None:
        """Drafts stay: they are the last tokens of their row, and are verified when it comes to them again."""
        if progress:
            rows, num_computed = np.array(progress, dtype=np.int64).T
            self.num_computed[rows] = num_computed
            self.is_written[rows] = False

    def extend(self, appended: AppendedTokens) -> None:
        row = appended.row
        num_tokens = len(appended.token_ids)
        # What the core says comes after what it knows: drafts do not count.
        start = int(self.num_verified(row))
        self.token_ids[row, start : start + num_tokens] = appended.token_ids
        self.num_total[row] = start + num_tokens
        self.num_drafts[row] = 0
        if not self.is_final[row]:  # 4.4.4, streaming prefill: what arrives before the end of the input is prompt
            self.num_prompt[row] += num_tokens
            self.most_total[row] = min(self.most_total[row] + num_tokens, self.token_ids.shape[1] - 1)
        self.is_final[row] = appended.is_final

    def write_blocks(self, block_writes: IntArray) -> None:
        if block_writes.size:  # most steps of a few rows have none
            groups, rows, indices, block_ids = block_writes
            self.block_tables[groups, rows, indices] = block_ids
            if self.notes_changes:
                _, num_rows, width = self.block_tables.shape
                self._changes.append((groups * num_rows + rows) * width + indices)
            self.is_written[rows] = False

    def take_changes(self) -> IntArray:
        """Numbers of the entries that were written since the last call, as if all tables were one vector."""
        changes = [np.empty(0, dtype=np.int64), *self._changes]
        self._changes = []
        return np.concatenate(changes)

    # ------------------------------------------------------------------------------------------ what a step computed

    def granted(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Rows that have something to compute, and how much: a grant is an upper bound, because the core may have
        counted on drafts that were not found or were wrong, or on a row that has failed."""
        num_tokens = np.minimum(num_tokens, self.num_total[rows] - self.num_computed[rows])
        has_some = num_tokens > 0
        return (rows, num_tokens) if has_some.all() else (rows[has_some], num_tokens[has_some])

    def advance(self, rows: IntArray, num_tokens: IntArray) -> None:
        self.num_computed[rows] += num_tokens
        self.is_written[rows] = False

    def append(self, rows: IntArray, lengths: IntArray, token_ids: IntArray) -> None:
        """What the model says stands at these lengths, which follow each other in a row and begin after its verified
        tokens: drafts that are right, then one that is wrong, or the token after the last."""
        if not self.num_drafts[rows].any():
            self.token_ids[rows, lengths] = token_ids
            self.num_total[rows] = lengths + 1  # of a row that occurs several times that of its last token
            return
        # a recurrent state has absorbed no drafts: right ones are computed once more
        computed = np.minimum(lengths, self.num_verified(rows)) if self.num_state_blocks else lengths
        is_right = (lengths < self.num_total[rows]) & (self.token_ids[rows, lengths] == token_ids)
        self.token_ids[rows, lengths] = token_ids
        # A row occurs several times: the last assignment holds, which is that of its last token.
        self.num_total[rows] = np.where(is_right, self.num_total[rows], lengths + 1)
        self.num_drafts[rows] = self.num_total[rows] - lengths - 1
        self.num_computed[rows] = computed

    def use_slots(self, rows: IntArray, slots: IntArray) -> None:
        """Where the adapters of these rows are in the step that comes."""
        self.adapter_slots[rows] = slots

    def add_drafts(self, rows: IntArray, drafts: IntArray) -> None:
        """Guesses [rows, K] after the tokens of rows that have none, -1 after the last of a row."""
        is_draft = drafts >= 0
        index, place = np.nonzero(is_draft)
        self.token_ids[rows[index], self.num_total[rows[index]] + place] = drafts[is_draft]
        self.num_drafts[rows] = is_draft.sum(axis=1)
        self.num_total[rows] += self.num_drafts[rows]

    def set_drafts(self, rows: IntArray, places: IntArray, token_ids: IntArray) -> None:
        """Each row once for each of its drafts; `places` 0, 1, 2 ... of a row. What it had of drafts counts no more."""
        num_verified = self.num_verified(rows)
        self.token_ids[rows, num_verified + places] = token_ids
        self.num_drafts[rows] = places + 1
        self.num_total[rows] = num_verified + places + 1

    def drafts_of(self, rows: IntArray) -> IntArray:
        """Columns (row, token), [2, n], as they follow each other."""
        rows = rows[self.num_drafts[rows] > 0]
        counts = self.num_drafts[rows]
        row_n = np.repeat(rows, counts)
        ends = counts.cumsum()
        index_n = np.arange(len(row_n)) - np.repeat(ends - counts, counts) + self.num_verified(row_n)
        return np.stack([row_n, self.token_ids[row_n, index_n].astype(np.int64)])

    def drop_drafts(self, rows: IntArray) -> None:
        """What was computed beyond the verified tokens of these rows is nothing."""
        self.num_total[rows] -= self.num_drafts[rows]
        self.num_drafts[rows] = 0
        self.num_computed[rows] = np.minimum(self.num_computed[rows], self.num_total[rows])

    def step_back(self, rows: IntArray) -> None:
        """Rows that have computed all they had, and no token was chosen: their last token is computed once more."""
        self.drop_drafts(rows)
        self.is_written[rows] = self.num_computed[rows] == self.num_total[rows]
        self.num_computed[rows] = np.minimum(self.num_computed[rows], self.num_total[rows] - 1)

    def num_verified(self, rows: int | list[int] | IntArray) -> Any:
        """Tokens of a row that are none of its drafts; of several rows, an array."""
        return self.num_total[rows] - self.num_drafts[rows]

    def clears_strange_tokens(self, row: int) -> bool:
        """Whether some are not in the vocabulary: they would be looked up outside of a table, so they become 0."""
        tokens = self.tokens_of(row)
        if not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            return False
        tokens[(tokens < 0) | (tokens >= self._vocab_size)] = 0
        return True

    def tokens_of(self, row: int) -> Any:
        """All of them, drafts included; a view."""
        return self.token_ids[row, : self.num_total[row]]

    def check_invariants(self) -> None:
        used = np.flatnonzero(self.is_used)
        total = self.num_total[used]
        assert (self.num_computed[used] >= 0).all()
        assert (self.num_computed[used] <= total).all(), "computed more tokens than there are"
        drafts = self.num_drafts[used]
        assert (drafts >= 0).all()
        is_behind = self.num_computed[used] < total - drafts
        assert (is_behind | (drafts == 0)).all(), "nothing is left to compute before the drafts"
        assert (self.is_final[used] | (drafts == 0)).all(), "drafts follow an input that is still arriving"
        assert (self.num_prompt[used] <= total - drafts).all(), "the prompt is longer than the sequence"
        assert (total <= self.token_ids.shape[1]).all(), "a sequence is longer than its row"
        for row, num_tokens in zip(used.tolist(), total.tolist(), strict=True):
            tokens = self.token_ids[row, :num_tokens]
            assert ((tokens >= 0) & (tokens < self._vocab_size)).all(), f"row {row} has a token beside the vocabulary"
            blocks = self.block_tables[:, row]
            assert ((blocks >= 0) & (blocks < max(1, self._num_blocks))).all(), f"row {row} has a block out of range"

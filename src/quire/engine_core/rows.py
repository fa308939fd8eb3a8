"""The scheduler's side of the rows: the two numbers of every sequence (4.4.2), as arrays.

Owns the numbering of rows. A sequence gets its row when it is first admitted and keeps it for life, also while it is
preempted; the worker uses the same numbers. A steady step reads and writes these arrays and touches no Python object
per sequence. Used by the scheduler, the KV cache manager and Sequence; never sent anywhere.
"""

from __future__ import annotations

import numpy as np

from quire.messages import IntArray

_STOP_COLUMNS = 4


class Rows:
    """Arrays over rows. Token memory is committed by the system only where it is touched."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.num_rows = num_rows
        self.tokens = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_total = np.zeros(num_rows, dtype=np.int64)
        # Tokens below this may be written without asking the KV cache manager: blocks are there and not shared.
        self.writable_until = np.zeros(num_rows, dtype=np.int64)
        # Tokens from this number on fill a block that the prefix cache does not know yet.
        self.next_block_end = np.zeros(num_rows, dtype=np.int64)
        self.max_total = np.zeros(num_rows, dtype=np.int64)
        self.min_total = np.zeros(num_rows, dtype=np.int64)
        self.sequence_id = np.full(num_rows, -1, dtype=np.int64)
        # True: the decoding method wants to see each token of this row before anything else happens
        self.is_watched = np.zeros(num_rows, dtype=np.bool_)
        self.stop_ids = np.full((num_rows, _STOP_COLUMNS), -1, dtype=np.int64)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self.sequence_id[row] = -1
        self.num_computed[row] = self.num_total[row] = self.writable_until[row] = 0
        self.is_watched[row] = False
        self._free.append(row)

    def remaining(self, rows: IntArray) -> IntArray:
        """4.4.2: the most that a step may grant each row."""
        return self.num_total[rows] - self.num_computed[rows]

    def set_stop_ids(self, row: int, ids: list[int]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((self.num_rows, len(ids)), -1, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token for each row; a row occurs once."""
        self.tokens[rows, self.num_total[rows]] = token_ids
        self.num_total[rows] += 1

    def check_invariants(self) -> None:
        used = np.flatnonzero(self.sequence_id >= 0)
        assert len(used) + len(self._free) == self.num_rows, "a row is neither free nor used, or both"
        assert len(set(self._free)) == len(self._free), "a row is free twice"
        assert (self.num_computed[used] >= 0).all()
        assert (self.num_computed[used] <= self.num_total[used]).all(), "computed more tokens than there are"
        assert (self.num_total[used] <= self.tokens.shape[1]).all()

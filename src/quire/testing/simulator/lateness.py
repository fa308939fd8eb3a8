"""Rows of the simulated worker whose next token is not there yet, as where masks take longer than a step.

A row that has computed all it had steps back by a token, and may be left out of the steps that follow. The core hears
where it stands, and decides again. What it has written stays as it is, until the row gets other blocks or goes on from
elsewhere: then it is no late row any more, and computes.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray
from quire.testing.simulator.rows import SimulatedRows

Flags = npt.NDArray[np.bool_]


class SimulatedLateness:
    """`share` of the tokens come later than they could. The step and the row decide it, and nothing else."""

    def __init__(self, rows: SimulatedRows) -> None:
        self._rows = rows
        self.share = 0.0
        self.num_late_rows = 0
        # of the running step
        self._late: list[int] = []

    def leave_out(self, step: int, rows: IntArray, fails: Flags) -> Flags:
        """Which compute nothing: what follows their last token would still not be there."""
        self._late.clear()
        if not self.share or not len(rows):
            return np.zeros(len(rows), dtype=np.bool_)
        state = self._rows
        is_next = state.is_late[rows] & (state.num_total[rows] - state.num_computed[rows] == 1)
        is_out: Flags = is_next & self._may_be_late(rows) & ~fails & self._is_unlucky(2 * step, rows)
        self._late += rows[is_out].tolist()
        return is_out

    def without_late(self, step: int, rows: IntArray, fails: Flags) -> IntArray:
        """Some that have computed all they had are late: they lose their drafts and get no token."""
        if not self.share or not len(rows):
            return rows
        state = self._rows
        is_done = (state.num_computed[rows] >= state.num_total[rows] - state.num_drafts[rows]) & state.is_final[rows]
        is_late = is_done & self._may_be_late(rows) & ~fails & self._is_unlucky(2 * step + 1, rows)
        state.is_late[rows] = is_late
        late = rows[is_late]
        state.num_total[late] -= state.num_drafts[late]
        state.num_drafts[late] = 0
        state.num_computed[late] = state.num_total[late] - 1
        self._late += late.tolist()
        return rows[~is_late]

    def report(self) -> IntArray:
        """As columns of StepOutput.speculated."""
        self.num_late_rows += len(self._late)
        rows = np.array(self._late, dtype=np.int64)
        nothing = np.zeros_like(rows)
        return np.array([rows, self._rows.num_computed[rows], self._rows.num_total[rows], nothing, nothing])

    def _may_be_late(self, rows: IntArray) -> Flags:
        """Those for which a worker chooses tokens."""
        may_be_late: Flags = (self._rows.num_candidates[rows] == 0) & ~self._rows.is_pooled[rows]
        return may_be_late

    def _is_unlucky(self, number: int, rows: IntArray) -> Flags:
        chances = [zlib.crc32(f"{number} {row}".encode()) / 2**32 for row in rows.tolist()]
        return np.array(chances) < self.share

"""The end of a step: new drafts behind the rows that are asked for some, and exact numbers for the core.

Owns the proposer. Whatever goes wrong with a proposer costs drafts and nothing else. Called by StepComputation, when
the tokens of the step stand in the row table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
from torch import Tensor

from quire.messages import NO_INTS, NUM_DRAFTS, IntArray, SchedulerOutput
from quire.worker.input_batch import InputBatch
from quire.worker.row_table import RowTable
from quire.worker.speculative.proposer import FinishedStep, NoProposer, Proposer
from quire.worker.step_member import StepMember

_logger = logging.getLogger(__name__)
_NO_REPORT: IntArray = np.empty((5, 0), dtype=np.int64)


class Drafting(StepMember):
    """Asks the proposer, and tells what became of its drafts."""

    def __init__(self, table: RowTable, proposer: Proposer) -> None:
        self._table = table
        self.proposer = proposer
        # False: nobody proposes, and a step has nothing to do here unless it was asked for drafts or has late rows
        self.is_on = type(proposer) is not NoProposer

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        self.proposer.set_progress(scheduled.progress)
        return {}

    def end_step(
        self,
        scheduled: SchedulerOutput,
        batch: InputBatch,
        hidden_TE: Tensor,
        sampled_rows: IntArray,
        late: Collection[int] = (),
    ) -> IntArray:
        """What StepOutput.speculated says of the step. `sampled_rows` has a row once for each of its new tokens; rows
        that are late have none yet."""
        asked = scheduled.step_data.get(NUM_DRAFTS)
        verified = self._verified(batch, sampled_rows) if batch.has_drafts else None
        rows_n, counts_n = self._asked(scheduled.rows, asked, sampled_rows)
        self._propose(FinishedStep(batch, hidden_TE, rows_n, counts_n))
        return self.report(scheduled, late, verified)

    def report(
        self, scheduled: SchedulerOutput, late: Collection[int] = (), verified: IntArray | None = None
    ) -> IntArray:
        """Rows that had drafts, were asked for some or are late, with their numbers; `verified` as below."""
        asked = scheduled.step_data.get(NUM_DRAFTS)
        if asked is None and verified is None and not late:
            return _NO_REPORT
        table = self._table
        rows = scheduled.rows
        if verified is None:
            verified = np.zeros((3, table.num_rows), dtype=np.int64)
        num_drafts, num_verified, num_accepted = verified[:, rows]
        is_concerned = num_drafts > 0
        if asked is not None:
            is_concerned |= asked > 0
        if late:
            is_concerned |= np.isin(rows, list(late))
        columns = rows, table.num_computed[rows], table.num_total[rows], num_verified, num_accepted
        return np.stack(columns)[:, is_concerned]

    def _verified(self, batch: InputBatch, sampled_rows: IntArray) -> IntArray:
        """Over all rows of the table: drafts before the step, how many of them were looked at, how many were right."""
        table = self._table
        rows_S = batch.rows_S
        num_new_S = np.bincount(sampled_rows, minlength=table.num_rows)[rows_S]
        first_S = table.num_verified(rows_S) - num_new_S
        num_looked_at_S = batch.num_computed_S + batch.num_tokens_S + 1 - first_S
        # A row says its right drafts, and then a token of its own unless other drafts are still to be verified.
        has_own_S = (num_new_S > 0) & (table.num_drafts[rows_S] == 0)
        verified = np.zeros((3, table.num_rows), dtype=np.int64)
        verified[:, rows_S] = (
            batch.num_drafts_S,
            np.clip(num_looked_at_S, 0, batch.num_drafts_S),
            num_new_S - has_own_S,
        )
        return verified

    def _asked(self, rows: IntArray, asked: IntArray | None, sampled_rows: IntArray) -> tuple[IntArray, IntArray]:
        """Rows that sampled and are asked for drafts, and for how many: no more than there is room for."""
        if asked is None:
            return NO_INTS, NO_INTS
        table = self._table
        room = table.token_ids.shape[1] - 1 - table.num_total[rows]
        # a chunk that ended before the last draft has sampled nothing: its other drafts are still there
        has_sampled = (np.bincount(sampled_rows, minlength=table.num_rows)[rows] > 0) & (table.num_drafts[rows] == 0)
        counts = np.where(has_sampled, np.minimum(asked, room), 0)
        return rows[counts > 0], counts[counts > 0]

    def _propose(self, step: FinishedStep) -> None:
        try:
            drafts_nK = self.proposer.propose(step)
        except Exception:
            # The step's tokens stand already: it cannot be repeated, and need not be.
            _logger.exception("the proposer failed: %d rows go on without drafts", len(step.rows_n))
            return
        if drafts_nK.size:
            is_granted_nK = np.arange(drafts_nK.shape[1]) < step.counts_n[:, None]
            self._table.add_drafts(step.rows_n, np.where(is_granted_nK, drafts_nK, -1))

"""A connector's worker half behind a wall: what it cannot bring costs a request, what it cannot take costs nothing.

Owns nothing. Each move is handed over by itself, so that an exception is about one sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from quire.kv_connectors.connector import STEP_DATA, StagedHalf, StepTransfers, WorkerHalf
from quire.messages import SchedulerOutput, StepOutput
from quire.worker.step_isolation import StepIsolation
from quire.worker.step_member import StepMember

logger = logging.getLogger(__name__)
NOT_FETCHED = "its keys and values could not be fetched, though they had been found. Send it again."
_NOTHING = StepTransfers()


class Transfers(StepMember):
    """Loads before a step, stores after it."""

    def __init__(self, connector: WorkerHalf, isolation: StepIsolation) -> None:
        self._connector = connector
        self._isolation = isolation

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        """Rows that miss what was to be loaded."""
        failures: dict[int, str] = {}
        for load in _moves_of(scheduled).loads:
            try:
                self._connector.load([load])
            except Exception:
                logger.exception("row %d: its prefix could not be loaded", load.row)
                self._isolation.fail(load.row, [block for table in load.blocks for block in table])
                failures[load.row] = NOT_FETCHED
        return failures

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        """Stores of rows that were computed. What is lost on the way is computed by whoever looks for it."""
        num_lost = 0
        for store in _moves_of(scheduled).stores:
            if store.row not in output.failures and not self._isolation.has_failed(store.row):
                try:
                    self._connector.store([store])
                except Exception:
                    logger.exception("row %d: its prompt could not be stored", store.row)
                    num_lost += 1
        self._spill(scheduled, output)
        if num_lost:
            output.counts["num_failed_stores"] = num_lost

    def _spill(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        spills = _moves_of(scheduled).spills
        if not spills:
            return
        doubtful = self._isolation.doubtful_blocks(output.failures)
        try:
            self._connector.spill([spill for spill in spills if spill.block not in doubtful])
        except Exception:
            logger.exception("%d blocks could not be kept elsewhere", len(spills))

    def close(self) -> None:
        self._connector.close()


class StageTransfers(Transfers):
    """Of a stage of a pipeline, behind what sends the step itself: the next stage waits for that first."""

    def __init__(self, connector: StagedHalf, isolation: StepIsolation) -> None:
        super().__init__(connector, isolation)
        self._half = connector

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        self._half.hand_on()
        super().end(scheduled, output)
        output.spilled = dict(self._half.take_spilled())

    def keep(self, blocks: Mapping[bytes, bytes]) -> None:
        self._half.keep(blocks)


def _moves_of(scheduled: SchedulerOutput) -> StepTransfers:
    moves: StepTransfers = scheduled.step_data.get(STEP_DATA, _NOTHING)
    return moves


def transfers_with(connector: WorkerHalf, isolation: StepIsolation, *, is_stage: bool) -> Transfers:
    """`is_stage`: of a pipeline, for which a connector has a half of another kind."""
    if is_stage:
        return StageTransfers(cast("StagedHalf", connector), isolation)
    return Transfers(connector, isolation)

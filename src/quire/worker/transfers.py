"""A connector's worker half behind a wall: what it cannot bring costs a request, what it cannot take costs nothing.

Owns nothing. Each move is handed over by itself, so that an exception is about one sequence. Called by ModelRunner.
"""

from __future__ import annotations

import logging

from quire.kv_connectors.connector import BlockLoad, BlockStore, WorkerHalf
from quire.messages import StepOutput
from quire.worker.step_isolation import StepIsolation

logger = logging.getLogger(__name__)
NOT_FETCHED = "its keys and values could not be fetched, though they had been found. Send it again."


class Transfers:
    """Loads before a step, stores after it."""

    def __init__(self, connector: WorkerHalf) -> None:
        self._connector = connector

    def load(self, loads: list[BlockLoad], isolation: StepIsolation) -> dict[int, str]:
        """Rows that miss what was to be loaded, with the reason."""
        failures: dict[int, str] = {}
        for load in loads:
            try:
                self._connector.load([load])
            except Exception:
                logger.exception("row %d: its prefix could not be loaded", load.row)
                isolation.fail(load.row, [block for table in load.blocks for block in table])
                failures[load.row] = NOT_FETCHED
        return failures

    def store(self, stores: list[BlockStore], output: StepOutput, isolation: StepIsolation) -> None:
        """Of rows that were computed. What is lost on the way is computed by whoever looks for it."""
        num_lost = 0
        for store in stores:
            if store.row not in output.failures and not isolation.has_failed(store.row):
                try:
                    self._connector.store([store])
                except Exception:
                    logger.exception("row %d: its prompt could not be stored", store.row)
                    num_lost += 1
        if num_lost:
            output.counts = {**output.counts, "num_failed_stores": num_lost}

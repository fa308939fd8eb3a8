"""Steps that were decided and whose results are not there yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.engine_core.request import Sequence
from quire.engine_core.rows import Rows
from quire.messages import IntArray


@dataclass(frozen=True)
class StepInFlight:
    """What the worker was told to do, and when in the life of the rows."""

    step: int
    rows: IntArray
    num_tokens: IntArray
    # by how much each row's total grew with what it was to sample and to propose
    growth: IntArray
    num_changes: int


class StepsInFlight(deque[StepInFlight]):
    """Earliest first. What they compute counts as computed from the decision on, and may still fail."""

    # in the life of the rows, when the last one was decided whose results are there
    settled_at = 0

    def num_settled(self, sequence: Sequence, rows: Rows) -> int:
        """How many of its computed tokens cannot fail any more."""
        if not sequence.is_begun:
            return 0  # it gave way: it has its tokens, but no blocks here
        row = sequence.row
        if self and rows.set_back_at[row] > self.settled_at:
            return 0  # it has begun since, maybe in blocks that a step in flight was to write
        return sequence.num_computed_tokens - sum(int(step.num_tokens[step.rows == row].sum()) for step in self)

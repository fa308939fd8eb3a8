"""Steps that were decided and whose results are not there yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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

    def num_granted(self, row: int) -> int:
        """Tokens of a row that are in the hands of the worker."""
        return sum(int(step.num_tokens[step.rows == row].sum()) for step in self)

"""Who runs: requests by arrival, which sequence sits in which row, and the steps that are under way.

Keeps the rows of all running sequences as one array, built again only when somebody came or went.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import numpy as np

from quire.engine_core.request import Request, Sequence, Status
from quire.engine_core.rows import Rows
from quire.messages import NO_INTS, IntArray


class Running:
    """Requests that hold blocks, and the sequences of all rows (those of preempted requests included)."""

    def __init__(self, rows: Rows) -> None:
        self.requests: list[Request] = []
        # rows that requests which have theirs will still fork into
        self.num_reserved_rows = 0
        self._rows = rows
        self._sequences: list[Sequence | None] = [None] * rows.num_rows
        # of each row: whether its request runs, when that one arrived, and when the row was taken
        self._runs = np.zeros(rows.num_rows, dtype=np.bool_)
        self._arrival = np.zeros(rows.num_rows, dtype=np.int64)
        self._placed = np.zeros(rows.num_rows, dtype=np.int64)
        self._num_placed = 0
        self._rows_in_order: IntArray | None = NO_INTS

    def join(self, request: Request) -> None:
        request.become(Status.RUNNING)
        request.was_started = True
        if not request.holds_rows:
            request.holds_rows = True
            self.num_reserved_rows += request.num_reserved_rows
        if not self.requests or self.requests[-1].arrival < request.arrival:
            self.requests.append(request)
        else:  # it has run before, or others went first
            insort(self.requests, request, key=attrgetter("arrival"))
        self._mark(request, runs=True)

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        self._mark(request, runs=False)

    def _mark(self, request: Request, *, runs: bool) -> None:
        for sequence in request.sequences.values():
            self._runs[sequence.row] = runs
        self._rows_in_order = None

    def leave_rows(self, request: Request) -> None:
        """The rows that it would still fork into."""
        request.holds_rows = False
        self.num_reserved_rows -= request.num_reserved_rows

    def place(self, sequence: Sequence) -> None:
        """A row for a sequence that has none yet."""
        sequence.place(self._rows)
        row = sequence.row
        self._sequences[row] = sequence
        self._num_placed += 1
        self._placed[row] = self._num_placed
        self._arrival[row] = sequence.request.arrival
        self._runs[row] = sequence.request.status is Status.RUNNING  # that of a fork
        self._rows_in_order = None

    def remove(self, row: int) -> None:
        self._sequences[row] = None
        self._runs[row] = False
        self._rows.give_back(row)
        self._rows_in_order = None

    def rows_in_order(self) -> IntArray:
        """By arrival, those of one request as its sequences began. Looks at no request: with many of them, most of
        which were not touched for a while, that takes longer than a step."""
        if self._rows_in_order is None:
            rows = self._runs.nonzero()[0]
            self._rows_in_order = rows[np.lexsort((self._placed[rows], self._arrival[rows]))]
        return self._rows_in_order

    def sequence_at(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence

    def sequences_at(self, rows: IntArray) -> list[Sequence]:
        sequences = [self._sequences[row] for row in rows.tolist()]
        assert None not in sequences, f"some of the rows {rows.tolist()} have no sequence"
        return cast("list[Sequence]", sequences)

    def find(self, row: int) -> Sequence | None:
        """None also for a row that does not exist."""
        return self._sequences[row] if 0 <= row < len(self._sequences) else None

    def living_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence is not None]


@dataclass(slots=True)
class StepInFlight:
    """What the worker was told to do, and when in the life of the rows."""

    step: int
    rows: IntArray
    num_tokens: IntArray
    # by how much each row's total grew with what it was to sample and to propose
    growth: IntArray
    num_changes: int
    # its tokens, each counted as so many as take its time, and those of images that it may encode
    work: int
    # tokens of all steps up to this one
    num_decided: int


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
        num_computed = sequence.num_computed_tokens
        return (
            num_computed - sum(int(step.num_tokens[step.rows == row].sum()) for step in self) if self else num_computed
        )

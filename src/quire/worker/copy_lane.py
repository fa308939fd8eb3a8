"""Swaps beside what the model computes: on a stream of their own, and waited for by what needs their blocks (4.6.1).

    compute   | step 7 | step 8, of other blocks | waits | step 9 writes block 3 |
    lane          | out: blocks 3, 5 -> host ......... |

A copy begins behind all that was asked of the device before it. What is asked later does not wait for it, unless it
uses one of the copy's blocks that came to it since: into a row's table, or as part of a copy of blocks. Who had such a
block before only reads it, as the copy to the host does, because what several hold is copied before it is written.
Copies stay in order among themselves, so that what goes to the host can come back.

Owns which copies are under way, and which rows have blocks of theirs; no table is ever searched. Called by KVCache,
which copies, and by ModelRunner, which says what comes into tables and which rows a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.messages import IntArray
from quire.worker.arrival import Mark


class CopyLane(Protocol):
    """A stream of a device, beside that on which it computes."""

    def run(self, work: Callable[[], None]) -> Mark:
        """Launches the work there, behind what the device was asked to compute so far; the mark stands behind it."""
        ...

    def wait(self, mark: Mark) -> None:
        """What the device is asked to compute from now on begins behind the mark. The host goes on."""
        ...


class CopiesUnderWay:
    """On a lane; without one a copy is a part of what is computed."""

    def __init__(self, lane: CopyLane | None = None, num_blocks: int = 0) -> None:
        self._lane = lane
        # of copies numbered from 1 on, those that nothing has waited for, and that were not seen to have passed
        self._marks: deque[Mark] = deque()
        self._num_copies = 0
        # the last copy that a block is part of, and the last whose blocks a row has
        self._copy_of_block = np.zeros(num_blocks, dtype=np.int64)
        self._copy_of_row: dict[int, int] = {}
        # steps that were computed beside a copy, and those that had to wait for one
        self.num_beside = 0
        self.num_waits = 0

    def run(self, work: Callable[[], None], blocks: IntArray) -> None:
        """`blocks`: of the device, which the work reads or writes."""
        if self._lane is None:
            work()
            return
        self._marks.append(self._lane.run(work))
        self._num_copies += 1
        self._copy_of_block[blocks] = self._num_copies

    def __bool__(self) -> bool:
        """Whether there are any."""
        while self._marks and self._marks[0].is_passed():
            self._marks.popleft()
        if not self._marks:
            self._copy_of_row.clear()
        return bool(self._marks)

    @property
    def _num_done(self) -> int:
        return self._num_copies - len(self._marks)

    def came(self, rows: IntArray, blocks: IntArray) -> None:
        """Blocks have come into the tables of rows, one into each. After the copies of the same step have begun."""
        if not self:
            return
        copies = self._copy_of_block[blocks]
        is_awaited = copies > self._num_done
        for row, copy in zip(rows[is_awaited].tolist(), copies[is_awaited].tolist(), strict=True):
            self._copy_of_row[row] = max(copy, self._copy_of_row.get(row, 0))

    def forked(self, parent_row: int, row: int) -> None:
        """A row has the blocks of another, and no others."""
        copy = self._copy_of_row.get(parent_row)
        if copy is None:
            self._copy_of_row.pop(row, None)
        else:
            self._copy_of_row[row] = copy

    def before_step(self, rows: IntArray) -> None:
        """What is computed from now on reads and writes what these rows have."""
        if self:
            is_needed = np.isin(list(self._copy_of_row), rows)
            needed = np.array(list(self._copy_of_row.values()), dtype=np.int64)[is_needed]
            self._wait_for(int(needed.max(initial=0)))

    def before_use(self, blocks: IntArray) -> None:
        """What is asked of the device from now on reads and writes these blocks."""
        if self:
            self._wait_for(int(self._copy_of_block[blocks].max(initial=0)))

    def _wait_for(self, copy: int) -> None:
        if copy <= self._num_done:
            self.num_beside += 1
            return
        assert self._lane is not None
        self.num_waits += 1
        while self._num_done < copy:
            mark = self._marks.popleft()
        self._lane.wait(mark)

"""Swaps beside what the model computes: on a stream of their own, and waited for by what needs their blocks (4.6.1).

    compute   | step 7 | step 8, of other blocks | waits | step 9 writes block 3 |
    lane          | out: blocks 3, 5 -> host ......... |

A copy begins behind all that was asked of the device before it. What is asked later does not wait for it, unless it
reads or writes one of the copy's blocks. Copies stay in order among themselves, so that what goes to the host can come
back.

Owns which copies are under way. Called by KVCache, which copies, and by ModelRunner, which says what a step uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Copy:
    mark: Mark
    blocks: IntArray


class CopiesUnderWay:
    """On a lane; without one a copy is a part of what is computed."""

    def __init__(self, lane: CopyLane | None = None) -> None:
        self._lane = lane
        self._copies: deque[_Copy] = deque()
        # steps that were computed beside a copy, and those that had to wait for one
        self.num_beside = 0
        self.num_waits = 0

    def run(self, work: Callable[[], None], blocks: IntArray) -> None:
        """`blocks`: of the device, which the work reads or writes."""
        if self._lane is None:
            work()
        else:
            self._copies.append(_Copy(self._lane.run(work), blocks))

    def __bool__(self) -> bool:
        """Whether there are any."""
        while self._copies and self._copies[0].mark.is_passed():
            self._copies.popleft()
        return bool(self._copies)

    def before_use(self, blocks: IntArray) -> None:
        """What is computed from now on may read and write these blocks."""
        if not self or self._lane is None:
            return
        needed = [number for number, copy in enumerate(self._copies) if np.isin(copy.blocks, blocks).any()]
        if not needed:
            self.num_beside += 1
            return
        self.num_waits += 1
        self._lane.wait(self._copies[needed[-1]].mark)
        for _ in range(needed[-1] + 1):
            self._copies.popleft()

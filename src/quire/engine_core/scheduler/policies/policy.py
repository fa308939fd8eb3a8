"""What a scheduling policy is: it proposes, the scheduler disposes.

A policy says who goes before whom by a key, which of the waiting requests may start now, and who gives way. It counts
no budget, asks for no block and changes nothing but what it keeps of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from quire.engine_core.request import Request
from quire.engine_core.scheduler.queues import WaitingQueues
from quire.messages import IntArray

Numbers = TypeVar("Numbers", int, IntArray)
# tokens that a waiting request would compute if it started now, after what the prefix cache has of it
NumRemaining = Callable[[Request], int]

# A key of two parts in one number: nobody has so many tokens left.
PRIORITY_STEP = 1 << 31


class SchedulingPolicy(Protocol):
    """One file each; others come through the entry point group `quire.policies`."""

    @property
    def is_preemptive(self) -> bool:
        """A waiting request may push less important ones out, wherever it is blocked: rows as well as blocks."""

    @property
    def progress_share(self) -> float:
        """Share of a short budget that goes to the earliest of the started requests that miss more than one token."""

    def key(self, priority: Numbers, num_remaining: Numbers) -> Numbers:
        """Who goes first when the budget is short: the smaller key; of equals those that run, then the earlier.

        For one request or, column by column, for all rows that run.
        """

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        """New requests that may start now, best first; only those more important than `limit`, if it is a number.

        Lazily: the scheduler stops asking when the budget is spent or somebody has no room.
        """

    def victim(self, running: list[Request]) -> Request:
        """Whom to preempt: one of these, who all may give way. At least one; not always all that run."""


def last_in_rank(running: list[Request]) -> Request:
    """3.4.5: lowest priority first (a smaller number is more important), then latest arrival."""
    return max(running, key=lambda request: (request.priority, request.arrival))

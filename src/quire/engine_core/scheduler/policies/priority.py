"""Strict priorities: the most important request goes first, wherever it is blocked (4.5.3 names it as a combination).

A waiting request pushes less important ones out of blocks and rows. Within a priority it is first in, first out. Less
important requests starve for as long as more important ones keep coming: that is what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.request import Request
from quire.engine_core.scheduler.policies.policy import Numbers, NumRemaining, last_in_rank
from quire.engine_core.scheduler.queues import WaitingQueues


class Priority:
    """Priority, then arrival."""

    is_preemptive = True
    progress_share = 0.0

    def key(self, priority: Numbers, num_remaining: Numbers) -> Numbers:
        return priority

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        return (request for line in queues.by_priority(limit) for request in line.values())

    def victim(self, running: list[Request]) -> Request:
        return last_in_rank(running)

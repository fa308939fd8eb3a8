"""First in, first out (4.5.1, algorithm 1): the earliest request is served first, the latest is preempted first.

Priorities do not change the order here, only who gives way when memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.request import Request
from quire.engine_core.scheduler.policies.policy import Numbers, NumRemaining, last_in_rank
from quire.engine_core.scheduler.queues import WaitingQueues


class Fifo:
    """Arrival order. Among the most important requests the earliest is never preempted, so nobody starves."""

    is_preemptive = False
    progress_share = 0.0

    def key(self, priority: Numbers, num_remaining: Numbers) -> Numbers:
        return num_remaining * 0

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        return queues.by_arrival(limit)

    def victim(self, running: list[Request]) -> Request:
        return last_in_rank(running)

"""Two-level scheduling (4.5.3, figure 4.2): first in, first out into a small staging queue, and within it the shortest.

    waiting, by arrival          staging, at most staging_size         running
    [ r9 r10 r11 ... ]  -- only when it is empty -->  [ r3 r7 ]  -- fewest remaining tokens first -->  [ r1 r2 ... ]

Staging is refilled only when it is empty, so whoever is in it starts before anybody who came later: the wait to the
first chunk is bounded, and what the prefix cache has is looked up for a few requests only. Once started, a long prompt
competes by remaining tokens; progress_share bounds that wait as well. A step sets budget aside for the batch that is in
staging, not for those behind it. Each priority has lines of its own and goes before the next one.

Where several tenants wait, a batch is filled by their shares and not by arrival (tenant_shares.py); of one tenant alone
it is the arrivals in their order, as in the drawing.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.policies.policy import PRIORITY_STEP, Numbers, NumRemaining, last_in_rank
from quire.engine_core.scheduler.queues import Line, WaitingQueues


class TwoLevel:
    """Priority, then remaining tokens within staging and running, then arrival."""

    is_preemptive = True

    def __init__(self, staging_size: int = 8, progress_share: float = 0.1) -> None:
        self.progress_share = progress_share
        self._staging_size = staging_size
        self._staging: dict[int, list[Request]] = {}

    def key(self, priority: Numbers, num_remaining: Numbers) -> Numbers:
        return priority * PRIORITY_STEP + num_remaining

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        if len(self._staging) > queues.num_priorities:
            self._staging = {priority: kept for priority, kept in self._staging.items() if queues.has_line(priority)}
        for line in queues.by_priority(limit):
            yield from self.staged(line, queues, num_remaining)

    def victim(self, running: list[Request]) -> Request:
        return last_in_rank(running)

    def staged(self, line: Line, queues: WaitingQueues, num_remaining: NumRemaining) -> list[Request]:
        """Those of one priority that may start, the shortest first; a line that is asked for has somebody in it."""
        priority = next(iter(line.values())).priority
        staged = [request for request in self._staging.get(priority, ()) if request.status is Status.WAITING]
        # 4.5.3: in batches, only when the staging queue is empty
        staged = staged or queues.shares.first(queues.lines_of(priority), self._staging_size, priority)
        self._staging[priority] = staged
        # one alone need not be looked up
        return sorted(staged, key=num_remaining) if len(staged) > 1 else staged

"""Shortest remaining tokens first (4.5.2, algorithm 2), over everything that waits and runs.

The best mean time to a first token, and no bound on the worst: a long prompt starves while shorter ones keep coming. It
looks up in the prefix cache what remains of every waiting request, again after each one that starts, so a step costs
what waits; `two_level` does the same over few requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.request import Request
from quire.engine_core.scheduler.policies.policy import Numbers, NumRemaining, last_in_rank
from quire.engine_core.scheduler.queues import WaitingQueues


class ShortestRemaining:
    """Remaining tokens, then arrival; priorities decide only who gives way."""

    is_preemptive = False
    progress_share = 0.0

    def key(self, priority: Numbers, num_remaining: Numbers) -> Numbers:
        return num_remaining

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        return iter(sorted(queues.by_arrival(limit), key=num_remaining))

    def victim(self, running: list[Request]) -> Request:
        return last_in_rank(running)

"""First in, first out (4.5.1, algorithm 1): the earliest request is served first, the latest is preempted first.

Priorities do not change the order here, only who gives way when memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.engine_core.request import Request


class Fifo:
    """Arrival order. Among requests of the greatest priority, the earliest is never preempted, so nobody starves."""

    def order(self, requests: Iterable[Request]) -> Iterator[Request]:
        return iter(requests)

    def victim(self, running: list[Request]) -> Request:
        # 3.4.5: lowest priority first (a smaller number is more important), then latest arrival
        return max(running, key=lambda request: (request.priority, request.arrival))

"""Requests that do not run: those that wait for their first step, and those that were preempted.

Both by arrival, with removal in constant time. While anything is preempted and not yet resumed, nothing new of its
priority or lower may be admitted (3.4.5): `lines` says so by what it yields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quire.engine_core.request import Request, Status


class WaitingQueues:
    """Arrival order in each; a preempted request goes back before everything that never ran."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._preempted: dict[int, Request] = {}
        self._num_by_priority: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        self._waiting[request.request_id] = request
        self._num_by_priority[request.priority] += 1

    def add_preempted(self, request: Request) -> None:
        request.status = Status.PREEMPTED
        self._preempted[request.request_id] = request

    def remove(self, request: Request) -> None:
        if self._waiting.pop(request.request_id, None) is not None:
            self._num_by_priority[request.priority] -= 1
            if not self._num_by_priority[request.priority]:
                del self._num_by_priority[request.priority]
        self._preempted.pop(request.request_id, None)

    def lines(self) -> Iterator[Iterator[Request]]:
        """Who may start, in lines by arrival: the head of the first line that has room goes first.

        More important requests must not wait for those that gave way, nor these for rows that they hold themselves.
        """
        # streamed input may not have brought a token yet
        waiting = (request for request in self._waiting.values() if request.num_prompt_tokens)
        # one that only waits for input needs nothing until it comes, and stands in nobody's way
        preempted = [request for request in self._preempted.values() if not request.is_idle]
        if not preempted:
            yield waiting
            return
        most_important = min(request.priority for request in preempted)
        if min(self._num_by_priority, default=most_important) < most_important:
            yield (request for request in waiting if request.priority < most_important)
        yield iter(sorted(preempted, key=lambda request: request.arrival))

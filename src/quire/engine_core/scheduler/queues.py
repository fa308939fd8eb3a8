"""Requests that do not run: those that wait for their first step, and those that were preempted.

Both by arrival, with removal in constant time. While anything is preempted and not yet resumed, only that may be
admitted (3.4.5): `candidates` says so by what it yields.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.request import Request, Status


class WaitingQueues:
    """Arrival order in each; a preempted request goes back before everything that never ran."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._preempted: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        self._waiting[request.request_id] = request

    def add_preempted(self, request: Request) -> None:
        request.status = Status.PREEMPTED
        self._preempted[request.request_id] = request

    def remove(self, request: Request) -> None:
        self._waiting.pop(request.request_id, None)
        self._preempted.pop(request.request_id, None)

    def candidates(self) -> Iterator[Request]:
        """A snapshot is not needed: the scheduler takes one candidate at a time and asks again."""
        if self._preempted:
            yield from sorted(self._preempted.values(), key=lambda request: request.arrival)
        else:
            # streamed input may not have brought a token yet
            yield from (request for request in self._waiting.values() if request.num_prompt_tokens)

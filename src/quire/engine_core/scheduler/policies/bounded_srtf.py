"""Shortest remaining tokens first, where nobody is overtaken without end.

    waiting, by arrival   [ r3  r4  r5 ...  r90 ]        by remaining tokens   r41 r7 r66 ...
                            |                                                   |
                            first, once it was overtaken as often as is allowed first, otherwise

Overtaken is who waits while one that came later starts. The first in the line is overtaken more often than anybody
behind it, so looking at it suffices: once that many later ones have started, it is next, whatever its length. How many
are allowed follows from the load: a share of the most that have waited at once since nobody did. What remains of a
request is looked up in the prefix cache when it is first seen, and again for the few that look shortest.

Each priority has a line of its own and goes before the next one. Where several tenants wait, it is two_level that
chooses among them by their shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import ceil

from quire.engine_core.request import Request
from quire.engine_core.scheduler.policies.policy import PRIORITY_STEP, Numbers, NumRemaining, last_in_rank
from quire.engine_core.scheduler.policies.two_level import TwoLevel
from quire.engine_core.scheduler.queues import Line, WaitingQueues

# that have gone may stand among those that wait
_FEW = 64


@dataclass
class _Seen:
    """What is known of a line since nobody waited in it."""

    num_arrived: int = 0
    most_waiting: int = 0
    # of those that wait, how many came before each; some have gone
    places: dict[int, tuple[Request, int]] = field(default_factory=dict)
    # (tokens that remained when it was seen, arrival, request), the least first; some have gone
    shortest: list[tuple[int, int, Request]] = field(default_factory=list)

    def knows(self, request: Request) -> bool:
        """An id may be used again, so it is not enough."""
        known = self.places.get(request.request_id)
        return known is not None and known[0] is request

    def add(self, request: Request, num_remaining: int) -> None:
        self.places[request.request_id] = request, self.num_arrived
        self.num_arrived += 1
        heappush(self.shortest, (num_remaining, request.arrival, request))

    def forget(self, request: Request) -> None:
        if self.knows(request):
            del self.places[request.request_id]

    def overtaken(self, first: Request, num_waiting: int) -> int:
        """How many have left the line that came after its first one: all that came before it have."""
        return self.num_arrived - num_waiting - self.places[first.request_id][1]


class BoundedShortest:
    """Priority, then remaining tokens; but the earliest, once `overtaking` of the line have overtaken it."""

    is_preemptive = True

    def __init__(self, num_candidates: int = 8, progress_share: float = 0.1, overtaking: float = 0.7) -> None:
        self.progress_share = progress_share
        self._num_candidates = num_candidates
        self._overtaking = overtaking
        self._seen: dict[int, _Seen] = {}
        self._of_tenants = TwoLevel(num_candidates, progress_share)

    def key(self, priority: Numbers, num_remaining: Numbers) -> Numbers:
        return priority * PRIORITY_STEP + num_remaining

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        if queues.num_priorities < len(self._seen):
            self._seen = {priority: seen for priority, seen in self._seen.items() if queues.has_line(priority)}
        for line in queues.by_priority(limit):
            first = next(iter(line.values()))
            if len(queues.lines_of(first.priority)) > 1:
                yield from self._of_tenants.staged(line, queues, num_remaining)
                continue
            seen = self._look(first, line, num_remaining)
            if seen.overtaken(first, len(line)) >= ceil(self._overtaking * seen.most_waiting):
                yield first
            else:
                yield from sorted(self._candidates(seen, line), key=num_remaining)

    def victim(self, running: list[Request]) -> Request:
        return last_in_rank(running)

    def _look(self, first: Request, line: Line, num_remaining: NumRemaining) -> _Seen:
        """The line with those that have come since the last look."""
        seen = self._seen.get(first.priority)
        if seen is None or not seen.knows(first):  # who comes later stands behind it, so nobody is known
            seen = self._seen[first.priority] = _Seen()
        new = list(takewhile(lambda request: not seen.knows(request), reversed(line.values())))
        for request in reversed(new):
            seen.add(request, num_remaining(request))
        seen.most_waiting = max(seen.most_waiting, len(line))
        if len(seen.shortest) > 2 * len(line) + _FEW:
            self._drop_gone(seen, line)
        return seen

    def _drop_gone(self, seen: _Seen, line: Line) -> None:
        seen.shortest = [entry for entry in seen.shortest if line.get(entry[2].request_id) is entry[2]]
        heapify(seen.shortest)
        seen.places = {number: known for number, known in seen.places.items() if line.get(number) is known[0]}

    def _candidates(self, seen: _Seen, line: Line) -> list[Request]:
        """Those that remain shortest by what was known when they came."""
        taken: list[tuple[int, int, Request]] = []
        while seen.shortest and len(taken) < self._num_candidates:
            entry = heappop(seen.shortest)
            if line.get(entry[2].request_id) is entry[2]:
                taken.append(entry)
            else:
                seen.forget(entry[2])
        for entry in taken:
            heappush(seen.shortest, entry)
        return [request for _, _, request in taken]

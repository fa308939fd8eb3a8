"""Requests that do not run: those that wait for their first step, and those that were preempted.

Both by arrival, with removal in constant time; waiting ones also by priority, a smaller number being more important.
While anything is preempted and not yet resumed, nothing new of its priority or lower may be admitted (3.4.5): `limit`
says so.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.tenant_shares import TenantShares

# By request id. Ordinary dicts look slowly for their first entry once many before it are gone.
Line = OrderedDict[int, Request]


class WaitingQueues:
    """Arrival order in each line; a preempted request goes back before everything that never ran."""

    def __init__(self) -> None:
        self.shares = TenantShares()
        self._by_arrival: Line = OrderedDict()
        self._by_priority: dict[int, Line] = {}
        # the same requests, of each priority by tenant
        self._by_tenant: dict[int, dict[int, Line]] = {}
        self._priorities: list[int] = []
        # streamed input of which not a token has come
        self._silent: Line = OrderedDict()
        # who waits for something that comes from elsewhere: they stand in no line, and in nobody's way
        self._awaiting: Line = OrderedDict()
        self._preempted: Line = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_arrival) + len(self._silent) + len(self._awaiting) + len(self._preempted)

    @property
    def are_empty(self) -> bool:
        """As `len` says, in a fraction of the time: each step asks a few times."""
        return not (self._by_arrival or self._preempted or self._silent or self._awaiting)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    @property
    def num_silent(self) -> int:
        """Those of whose prompt nothing has come yet."""
        return len(self._silent)

    @property
    def num_awaiting(self) -> int:
        """Those that wait for something that comes from elsewhere."""
        return len(self._awaiting)

    def is_awaiting(self, request: Request) -> bool:
        return request.request_id in self._awaiting

    def await_arrival(self, request: Request) -> None:
        """It gets its place in line when all is there: until then, others need not wait for it."""
        self._awaiting[request.request_id] = request

    def add(self, request: Request) -> None:
        self._awaiting.pop(request.request_id, None)
        if not request.num_prompt_tokens:
            self._silent[request.request_id] = request
            return
        self._silent.pop(request.request_id, None)
        if request.priority not in self._by_priority:
            self._by_priority[request.priority] = OrderedDict()
            self._by_tenant[request.priority] = {}
            insort(self._priorities, request.priority)
        lines = self._by_tenant[request.priority]
        if request.tenant not in lines:
            lines[request.tenant] = OrderedDict()
            self.shares.begin_to_wait(request.tenant, request.priority)
        self._by_arrival[request.request_id] = request
        self._by_priority[request.priority][request.request_id] = request
        lines[request.tenant][request.request_id] = request

    def add_preempted(self, request: Request) -> None:
        request.become(Status.PREEMPTED)
        self._preempted[request.request_id] = request

    def remove(self, request: Request) -> None:
        """From wherever it is: in one of these."""
        if self._by_arrival.pop(request.request_id, None) is None:
            for others in (self._preempted, self._silent, self._awaiting):
                others.pop(request.request_id, None)
            return
        line = self._by_priority[request.priority]
        lines = self._by_tenant[request.priority]
        del line[request.request_id], lines[request.tenant][request.request_id]
        if not lines[request.tenant]:
            del lines[request.tenant]
        if not line:
            del self._by_priority[request.priority], self._by_tenant[request.priority]
            self._priorities.remove(request.priority)
            self.shares.nobody_waits(request.priority)

    def is_waiting(self, request: Request) -> bool:
        return self._by_arrival.get(request.request_id) is request

    @property
    def num_priorities(self) -> int:
        return len(self._priorities)

    def has_line(self, priority: int) -> bool:
        return priority in self._by_priority

    def lines_of(self, priority: int) -> dict[int, Line]:
        """New requests of one priority by tenant, each line by arrival."""
        return self._by_tenant[priority]

    # ------------------------------------------------------------------------------------------ who may start

    @property
    def most_important(self) -> int | None:
        """Of all that could start or go on: the priority of the most important one, which is the smallest number."""
        first = self._priorities[:1]
        if not self._preempted:
            return first[0] if first else None
        return min([*first, *(request.priority for request in self.preempted())], default=None)

    @property
    def limit(self) -> int | None:
        """New requests must be more important than this; None: there is no limit.

        One that only waits for input needs nothing until it comes, and stands in nobody's way.
        """
        return min((request.priority for request in self.preempted()), default=None) if self._preempted else None

    def preempted(self) -> list[Request]:
        """Those that could go on; `all_preempted` and `num_preempted` count those that wait for input as well."""
        return [request for request in self._preempted.values() if not request.waits_for_input]

    def in_line(self) -> Iterator[Request]:
        """All of them, those that gave way first, each by arrival. The policy has its own order."""
        yield from sorted(self._preempted.values(), key=lambda request: request.arrival)
        yield from self._by_arrival.values()
        yield from self._awaiting.values()
        yield from self._silent.values()

    def all_preempted(self) -> list[Request]:
        return list(self._preempted.values())

    def by_arrival(self, limit: int | None) -> Iterator[Request]:
        """New requests, earliest first."""
        if limit is None:
            return iter(self._by_arrival.values())
        lines = list(self.by_priority(limit))
        return iter(sorted((request for line in lines for request in line.values()), key=lambda one: one.arrival))

    def by_priority(self, limit: int | None) -> Iterator[Line]:
        """Lines of new requests, the most important first; lazily, each by arrival."""
        for priority in self._priorities:
            if limit is not None and priority >= limit:
                return
            yield self._by_priority[priority]

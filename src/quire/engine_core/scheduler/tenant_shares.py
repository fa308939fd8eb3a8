"""Shares of tenants in the engine: whose turn it is when several of them have requests that wait.

Each tenant has a virtual time: the tokens that it was granted, prompts and outputs alike, divided by its weight. Whose
time is the least goes first, so of two that always want something, one of weight 2 gets twice the tokens of one of
weight 1; a thousand waiting requests buy nothing. Time that a tenant did not use is not saved up: one that begins to
wait, or all of whose requests were taken, is no earlier than the one whose turn it was last. (Start-time fair queueing;
who merely runs, or is silent, holds nobody's clock.) Each priority has a clock of its own, since those who wait there
do not wait for the others.

Owns the numbering of tenants. While there is one, nothing is charged. Called by the lifecycle and the queues (who
comes, waits and goes), by policies (whose turn) and by the scheduler (what was granted).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from quire.messages import IntArray, Tenancy

if TYPE_CHECKING:
    from quire.engine_core.request import Request
    from quire.engine_core.scheduler.queues import Line

# A name that nobody can have: requests without a tenant.
_NOBODY = ""
# Beyond so many, those who are away are forgotten, who had least first.
_MOST_REMEMBERED = 1024


@dataclass
class _Clock:
    """Of one priority: where the one was whose turn it was last, which never goes back; and by tenant what is added to
    the tokens that it had."""

    now: float
    lifts: dict[int, float] = field(default_factory=dict)


class TenantShares:
    """Tenants by number; number 0 is nobody in particular."""

    def __init__(self) -> None:
        self._number_by_name = {_NOBODY: 0}
        # tokens by weight, of all priorities
        self._used = np.zeros(1)
        self._weights = np.ones(1)
        # living requests of those who have any
        self._counts: dict[int, int] = {}
        # of each priority at which somebody waits
        self._clocks: dict[int, _Clock] = {}

    @property
    def are_several(self) -> bool:
        return len(self._used) > 1

    @property
    def num_remembered(self) -> int:
        return len(self._number_by_name)

    # ------------------------------------------------------------------------------------------ coming and going

    def enter(self, tenant: Tenancy | None) -> int:
        """One more request; the number of its tenant."""
        number = 0 if tenant is None else self._number_of(tenant)
        self._counts[number] = self._counts.get(number, 0) + 1
        return number

    def leave(self, number: int) -> None:
        """One request less."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._counts[number]

    def begin_to_wait(self, number: int, priority: int) -> None:
        """A line of this tenant has somebody in it from now on.

        Where nobody waited, nobody was held up by another: all begin where the one is who had most.
        """
        clock = self._clocks.get(priority)
        if clock is None:
            most = self._used.max() if self.are_several else self._used[0]
            clock = self._clocks[priority] = _Clock(float(most))
        self._lift(clock, number)

    def nobody_waits(self, priority: int) -> None:
        del self._clocks[priority]

    def _time(self, clock: _Clock, number: int) -> float:
        return float(self._used[number]) + clock.lifts.get(number, 0.0)

    def _lift(self, clock: _Clock, number: int) -> None:
        """Time that it did not use is gone."""
        clock.lifts[number] = max(clock.lifts.get(number, 0.0), clock.now - float(self._used[number]))

    def _number_of(self, tenant: Tenancy) -> int:
        name = tenant.name
        weight = tenant.weight
        number = self._number_by_name.get(name)
        if number is None:
            number = self._free_number()
            self._number_by_name[name] = number
            self._used[number] = 0.0
        self._weights[number] = weight
        return number

    def _free_number(self) -> int:
        if len(self._used) >= _MOST_REMEMBERED:
            away = [(name, number) for name, number in self._number_by_name.items() if number not in self._counts]
            name, number = min(away[1:], key=lambda one: float(self._used[one[1]]), default=(_NOBODY, 0))
            if number:
                del self._number_by_name[name]
                for clock in self._clocks.values():
                    clock.lifts.pop(number, None)
                return number
        self._used = np.append(self._used, 0.0)
        self._weights = np.append(self._weights, 1.0)
        return len(self._used) - 1

    # ------------------------------------------------------------------------------------------ shares

    def charge(self, tenants: IntArray, num_tokens: IntArray) -> None:
        """Tokens that were granted, and to whom."""
        if self.are_several:
            granted = np.bincount(tenants, weights=num_tokens, minlength=len(self._used))
            self._used += granted / self._weights

    def first(self, lines: Mapping[int, Line], most: int, priority: int) -> list[Request]:
        """So many of those who wait at this priority, whose turn it is first. A line alone comes in its order.

        Each that is taken counts with its prompt, so that one tenant does not fill the batch before it is charged.
        """
        clock = self._clocks[priority]
        if len(lines) == 1:
            ((number, line),) = lines.items()
            clock.now = max(clock.now, self._time(clock, number))
            return list(islice(line.values(), most))
        waiting = {number: iter(line.values()) for number, line in lines.items()}
        heads = {number: next(line) for number, line in waiting.items()}
        heap = [(self._time(clock, number), head.arrival, number) for number, head in heads.items()]
        heapify(heap)
        taken: list[Request] = []
        drained: list[int] = []
        while heap and len(taken) < most:
            time, _, number = heap[0]
            taken.append(heads[number])
            clock.now = max(clock.now, self._time(clock, number))
            time += heads[number].num_prompt_tokens / float(self._weights[number])
            following = next(waiting[number], None)
            if following is None:
                heappop(heap)
                drained.append(number)
            else:
                heads[number] = following
                heapreplace(heap, (time, following.arrival, number))
        for number in drained:
            self._lift(clock, number)
        return taken

    def check_invariants(self, num_requests: int) -> None:
        assert min(self._counts.values(), default=1) > 0, "a tenant has less than no requests"
        assert sum(self._counts.values()) == num_requests, "the requests of tenants are not those that live"
        assert np.count_nonzero(np.isfinite(self._used)) == len(self._used), "a tenant's time is no number"

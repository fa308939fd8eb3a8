"""What is in use, where it is written down. One process keeps it to itself; several keep it together
(processes/shared_ledger.py), so that every bound holds for all of them.

A bound is shared by several tenants without any of them being able to use all of it:

    [ A's part | B's part |        for whoever comes first        ]
     `-- half of the places, by weight --´

A tenant's part is kept free for it; the rest is anybody's. One tenant alone has all of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_WINDOW_SECONDS = 30


class Bound(Protocol):
    """Places, counted by tenant (SharedBound)."""

    @property
    def most(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    def used_by(self, tenant: str) -> int: ...
    def has_room(self, tenant: str, amount: int) -> bool: ...
    def most_for(self, tenant: str) -> int: ...
    def take(self, tenant: str, amount: int) -> None: ...
    def give_back(self, tenant: str, amount: int) -> None: ...
    def resized(self, most: int) -> Bound:
        """The same places are taken of another number of them."""


class Ledger(Protocol):
    # that keep it
    num_processes: int

    def bound(self, what: str, most: int, weights: Mapping[str, float]) -> Bound: ...

    def bucket(self, tenant: str, per_minute: int, now: float) -> TokenBucket: ...

    def num_in_flight(self, tenant: str, own: int) -> int:
        """In all processes, of which this one has `own`."""

    def note_in_flight(self, tenant: str, own: int) -> None: ...

    def locked(self) -> AbstractContextManager[object]:
        """Nobody else looks or changes anything meanwhile. Never across an await."""


class OwnLedger:
    """Of a process that is alone."""

    num_processes = 1

    def bound(self, what: str, most: int, weights: Mapping[str, float]) -> Bound:
        return SharedBound(most, weights)

    def bucket(self, tenant: str, per_minute: int, now: float) -> TokenBucket:
        return TokenBucket(per_minute, now)

    def num_in_flight(self, tenant: str, own: int) -> int:
        return own

    def note_in_flight(self, tenant: str, own: int) -> None:
        """Nobody else wants to know."""

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext()


class SharedBound:
    """Counts places. Taken and free ones are always exactly `most`."""

    def __init__(self, most: int, weights: Mapping[str, float] | None = None) -> None:
        self.most = most
        self._weights = weights or {}
        self._parts = parts_of(most, self._weights)
        self._used: dict[str, int] = {}
        # what is taken, and what is kept free for others
        self._claimed = sum(self._parts.values())
        self.num_used = 0

    def used_by(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def has_room(self, tenant: str, amount: int) -> bool:
        return self._claimed + self._growth(tenant, amount) <= self.most

    def most_for(self, tenant: str) -> int:
        """Places that it could have if nobody else had anything."""
        return self.most - sum(self._parts.values()) + self._parts.get(tenant, 0)

    def take(self, tenant: str, amount: int) -> None:
        self._claimed += self._growth(tenant, amount)
        self.num_used += amount
        used = self._used.get(tenant, 0) + amount
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)

    def give_back(self, tenant: str, amount: int) -> None:
        self.take(tenant, -amount)

    def resized(self, most: int) -> SharedBound:
        """The same places are taken of another number of them."""
        bound = SharedBound(most, self._weights)
        for tenant, amount in self._used.items():
            bound.take(tenant, amount)
        return bound

    def _growth(self, tenant: str, amount: int) -> int:
        """By how much `amount` more for this tenant changes what is claimed."""
        used = self._used.get(tenant, 0)
        part = self._parts.get(tenant, 0)
        return max(part, used + amount) - max(part, used)


def parts_of(most: int, weights: Mapping[str, float]) -> dict[str, int]:
    """What is kept for each of several tenants."""
    total = sum(weights.values())
    return {name: int(most // 2 * weight / total) for name, weight in weights.items()} if len(weights) > 1 else {}


class Throughput:
    """Amounts that left, second by second. The time is handed in."""

    def __init__(self) -> None:
        # [second, amount], oldest first: at most one a second of the window
        self._seconds: deque[list[float]] = deque()
        self._first = math.inf

    def add(self, amount: float, now: float) -> None:
        self._forget(now)
        self._first = min(self._first, now)
        second = math.floor(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += amount
        else:
            self._seconds.append([second, amount])

    def rate(self, now: float) -> float:
        """A second's amount; 0 if nothing has left lately."""
        self._forget(now)
        return sum(amount for _, amount in self._seconds) / min(_WINDOW_SECONDS, max(1.0, now - self._first))

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - _WINDOW_SECONDS:
            self._seconds.popleft()
        if not self._seconds:
            self._first = math.inf


class TokenBucket:
    """Tokens per minute, averaged: a minute's may be used at once, and what was used comes back evenly.

    The level may go below 0, because how long an answer becomes is known at its end; then the next one waits.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._capacity = float(per_minute)
        self._rate = per_minute / 60
        self._level = self._capacity
        self._filled_at = now

    def level(self, now: float) -> float:
        self._level = min(self._capacity, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Until so much is there, or it is full."""
        return max(0.0, (min(amount, self._capacity) - self.level(now)) / self._rate)

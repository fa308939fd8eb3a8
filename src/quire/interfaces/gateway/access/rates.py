"""Amounts over time: how fast work leaves a queue, and tokens a minute."""

from __future__ import annotations

import math
from collections import deque

_WINDOW_SECONDS = 30


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

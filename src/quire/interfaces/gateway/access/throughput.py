"""How fast work leaves a queue, measured over the last seconds: what a refused client is told to wait for."""

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

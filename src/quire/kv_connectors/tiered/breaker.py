"""A breaker: a store that fails is left alone for a while, so that nobody waits for it again and again.

closed --- failures in a row ---> open --- a while ---> half-open --- it works ---> closed
                                    ^                       |
                                    '----- it fails --------'           each time for twice as long, to a bound
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_MOST_FAILURES = 3
_FIRST_SECONDS = 2.0
_MOST_SECONDS = 60.0


class Breaker:
    """`clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._seconds = _FIRST_SECONDS
        self._opens_until: float | None = None
        self.num_openings = 0

    @property
    def is_open(self) -> bool:
        return self._opens_until is not None

    @property
    def rests(self) -> bool:
        """It is open, and the while is not over: nobody is let in."""
        until = self._opens_until
        return until is not None and self._clock() < until

    def lets_in(self) -> bool:
        """Whether the store may be asked. After a while one is let in, to see."""
        with self._lock:
            if self._opens_until is None:
                return True
            if self._clock() < self._opens_until:
                return False
            self._opens_until = self._clock() + self._seconds
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0
            self._seconds = _FIRST_SECONDS
            self._opens_until = None

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            if self._num_failures < _MOST_FAILURES:
                return
            if self._opens_until is None:
                self.num_openings += 1
            else:
                self._seconds = min(2 * self._seconds, _MOST_SECONDS)
            self._opens_until = self._clock() + self._seconds

"""When an engine that died is started again. Reads no clock."""

from __future__ import annotations

from collections import deque

_FIRST_PAUSE = 0.5
_MOST_DOUBLINGS = 6


class RestartPolicy:
    """How often a dead engine is started again: at once, then later and later, and not for ever.

    `most` restarts within `seconds`. Times are of any clock that only goes forward.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._restarts: deque[float] = deque()

    def pause(self, now: float) -> float | None:
        """Seconds to wait before the next start, which is counted with this call; None: it was tried too often."""
        while self._restarts and now - self._restarts[0] >= self._seconds:
            self._restarts.popleft()
        number = len(self._restarts)
        if number >= self._most:
            return None
        self._restarts.append(now)
        return _FIRST_PAUSE * (2.0 ** min(number, _MOST_DOUBLINGS) - 1.0)

    def __str__(self) -> str:
        return f"{self._most} restarts within {self._seconds:g} s"

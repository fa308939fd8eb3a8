"""Stands in for a device's stream of copies, and is as late as a stream may be: a copy happens when something waits for
it, and not before. What should have waited and did not reads what was there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RecordedMark:
    def __init__(self, number: int) -> None:
        self.number = number
        self.is_done = False

    def is_passed(self) -> bool:
        return self.is_done


class RecordedLane:
    """`events`: ("run", number) where a copy was asked for, ("wait", number) where what is computed waits for it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._waiting: list[tuple[RecordedMark, Callable[[], Any]]] = []
        self._num_copies = 0

    def run(self, work: Callable[[], Any]) -> RecordedMark:
        mark = RecordedMark(self._num_copies)
        self._num_copies += 1
        self.events.append(("run", mark.number))
        self._waiting.append((mark, work))
        return mark

    def wait(self, mark: RecordedMark) -> None:
        self.events.append(("wait", mark.number))
        while self._waiting and not mark.is_done:
            first, work = self._waiting.pop(0)
            work()
            first.is_done = True

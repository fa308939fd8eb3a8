"""A ring that is bounded by bytes: the newest entries that fit, numbered from the first one on."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Entries with their sizes. Numbers go on counting when old entries have gone, so a reader sees what it missed."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: deque[tuple[T, int]] = deque()
        self.num_bytes = 0
        # of the entry that will be appended next
        self.next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_number(self) -> int:
        """Of the oldest entry that is still there."""
        return self.next_number - len(self._entries)

    def append(self, entry: T, size: int) -> None:
        self._entries.append((entry, size))
        self.next_number += 1
        self.num_bytes += size
        while self.num_bytes > self._most_bytes:
            self.num_bytes -= self._entries.popleft()[1]

    def since(self, number: int, limit: int) -> list[T]:
        """Entries from `number` on, oldest first, at most `limit`."""
        start = min(max(0, number - self.first_number), len(self._entries))
        end = min(start + max(0, limit), len(self._entries))
        # a deque is walked from the nearer of its ends; whoever follows the newest must not pass all that is older
        if start > len(self._entries) - end:
            newest_first = islice(reversed(self._entries), len(self._entries) - end, len(self._entries) - start)
            return [entry for entry, _ in newest_first][::-1]
        return [entry for entry, _ in islice(self._entries, start, end)]

    def last(self, count: int) -> list[T]:
        return self.since(self.next_number - count, count)

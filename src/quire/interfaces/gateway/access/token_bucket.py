"""Tokens per minute, averaged: a minute's tokens may be used at once, and what was used comes back evenly."""

from __future__ import annotations


class TokenBucket:
    """The level may go below 0, because how long an answer becomes is known at its end; then the next one waits."""

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

"""What a scheduling policy is: it proposes, the scheduler disposes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from quire.engine_core.request import Request


class SchedulingPolicy(Protocol):
    """An order of candidates and a choice of victim; it changes nothing itself."""

    def order(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Candidates, best first; lazily, because the scheduler stops asking when the budget is spent.

        `requests` come by arrival, earliest first.
        """

    def victim(self, running: list[Request]) -> Request:
        """Whom to preempt. `running` is in the order of `order`."""

"""What is in use, where it is written down. One process keeps it to itself; several keep it together
(processes/shared_ledger.py), so that every bound holds for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from quire.interfaces.gateway.access.rates import TokenBucket
from quire.interfaces.gateway.access.shared_bound import SharedBound


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

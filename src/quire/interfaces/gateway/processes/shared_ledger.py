"""A ledger that several processes keep on one page of memory, so that a bound holds for all of them together.

    [ process 0: requests | tokens | in flight, a number for each tenant ][ process 1 ... ] ... [ buckets of tokens ]

Each process writes its own numbers and reads everybody's, under a lock of the file behind the page; the kernel lets go
of the lock of a process that dies, and nobody waits long for one that stands still. What a dead process had in use is
wiped by the first one. Names of tenants that the page does not know (their key is gone) share one place.
"""

from __future__ import annotations

import fcntl
import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from quire.interfaces.gateway.access.ledger import TokenBucket, parts_of
from quire.processes.nameless_file import nameless_file

_KINDS = ("requests", "tokens", "in_flight")
_CELL_BYTES = 8
# for the lock, which is held for microseconds by a process that runs
_LONGEST_WAIT = 0.1
_LOOK_SECONDS = 0.00005


def make_page(num_seats: int, tenants: Sequence[str]) -> int:
    """A file full of zeros: its descriptor, which other processes inherit."""
    return nameless_file("quire-ledger", size=_num_cells(num_seats, len(tenants) + 1) * _CELL_BYTES)


def _num_cells(num_seats: int, num_columns: int) -> int:
    return num_seats * len(_KINDS) * num_columns + 2 * num_columns


class SharedLedger:
    """One process's view of the page."""

    def __init__(self, descriptor: int, seat: int, num_seats: int, tenants: Sequence[str]) -> None:
        self.num_processes = num_seats
        self._descriptor = descriptor
        self._seat = seat
        self._columns = {name: column for column, name in enumerate(tenants)}
        self._num_columns = len(tenants) + 1
        page: Any = memoryview(mmap.mmap(descriptor, _num_cells(num_seats, self._num_columns) * _CELL_BYTES))
        self._numbers = page.cast("q")
        self._levels = page.cast("d")
        self._first_level = num_seats * len(_KINDS) * self._num_columns
        self._depth = 0
        # who has waited once for one that stands still does not wait again, until the lock was free
        self._is_patient = True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        is_taken = self._depth == 0 and self._take_lock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if is_taken:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _take_lock(self) -> bool:
        """False if a process stands still with it. Without the lock a bound may be passed by a few; to wait for it
        would stop this process too, and nobody would be left to kill that one."""
        deadline = None
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                now = time.monotonic()
                deadline = deadline or now + _LONGEST_WAIT
                if not self._is_patient or now > deadline:
                    self._is_patient = False
                    return False
                time.sleep(_LOOK_SECONDS)
            else:
                self._is_patient = True
                return True

    def locked(self) -> AbstractContextManager[object]:
        return self._lock()

    def bound(self, what: str, most: int, weights: Mapping[str, float]) -> BoundOfAll:
        return BoundOfAll(self, _KINDS.index(what), most, weights)

    def bucket(self, tenant: str, per_minute: int, now: float) -> TokenBucket:
        at = self._first_level + 2 * self._column(tenant)
        return SharedBucket(per_minute, now, self._levels[at : at + 2], self)

    def num_in_flight(self, tenant: str, own: int) -> int:
        return self.sum(_KINDS.index("in_flight"), tenant)

    def note_in_flight(self, tenant: str, own: int) -> None:
        self._numbers[self._cell(self._seat, _KINDS.index("in_flight"), tenant)] = own

    def wipe(self, seat: int) -> None:
        """The process that had this seat is dead, and uses nothing any more."""
        with self._lock():
            width = len(_KINDS) * self._num_columns
            for cell in range(seat * width, (seat + 1) * width):
                self._numbers[cell] = 0

    # ------------------------------------------------------------------------------------------ for its bounds

    def sum(self, kind: int, tenant: str) -> int:
        return sum(self._numbers[self._cell(seat, kind, tenant)] for seat in range(self.num_processes))

    def total(self, kind: int) -> int:
        width = self._num_columns
        first = kind * self._num_columns
        starts = range(first, self._first_level, len(_KINDS) * width)
        return sum(sum(self._numbers[start : start + width]) for start in starts)

    def add(self, kind: int, tenant: str, amount: int) -> None:
        """To this process's own."""
        self._numbers[self._cell(self._seat, kind, tenant)] += amount

    def _column(self, tenant: str) -> int:
        return self._columns.get(tenant, self._num_columns - 1)

    def _cell(self, seat: int, kind: int, tenant: str) -> int:
        return (seat * len(_KINDS) + kind) * self._num_columns + self._column(tenant)


class BoundOfAll:
    """A SharedBound whose places are taken by several processes."""

    def __init__(self, ledger: SharedLedger, kind: int, most: int, weights: Mapping[str, float]) -> None:
        self.most = most
        self._ledger = ledger
        self._kind = kind
        self._weights = weights
        self._parts = parts_of(most, weights)

    @property
    def num_used(self) -> int:
        return self._ledger.total(self._kind)

    def used_by(self, tenant: str) -> int:
        return self._ledger.sum(self._kind, tenant)

    def has_room(self, tenant: str, amount: int) -> bool:
        used = {name: self.used_by(name) for name in self._parts}
        kept_free = sum(max(0, part - used[name]) for name, part in self._parts.items())
        own_part_free = max(0, self._parts.get(tenant, 0) - used.get(tenant, 0))
        return self.num_used + kept_free + max(0, amount - own_part_free) <= self.most

    def most_for(self, tenant: str) -> int:
        return self.most - sum(self._parts.values()) + self._parts.get(tenant, 0)

    def take(self, tenant: str, amount: int) -> None:
        self._ledger.add(self._kind, tenant, amount)

    def give_back(self, tenant: str, amount: int) -> None:
        self._ledger.add(self._kind, tenant, -amount)

    def resized(self, most: int) -> BoundOfAll:
        return BoundOfAll(self._ledger, self._kind, most, self._weights)


class SharedBucket(TokenBucket):
    """Its level and the time of it lie on the page. Zeros: nobody has used it yet."""

    def __init__(self, per_minute: int, now: float, cells: Any, ledger: SharedLedger) -> None:
        self._cells = cells
        self._ledger = ledger
        with ledger.locked():
            level, filled_at = cells
            super().__init__(per_minute, now)
            if filled_at:
                self._level = level
                self._filled_at = filled_at

    @property
    def _level(self) -> float:
        return float(self._cells[0])

    @_level.setter
    def _level(self, level: float) -> None:
        self._cells[0] = level

    @property
    def _filled_at(self) -> float:
        return float(self._cells[1])

    @_filled_at.setter
    def _filled_at(self, time: float) -> None:
        self._cells[1] = time

    def level(self, now: float) -> float:
        with self._ledger.locked():
            return super().level(now)

    def take(self, amount: int, now: float) -> None:
        with self._ledger.locked():
            super().take(amount, now)

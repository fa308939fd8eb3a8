"""Memory that the ranks of one machine share: where the operators meet (`csrc/cpu/operators_ranks.cpp` draws it).

It has no name in any folder, so nothing is left behind by whoever dies: a rank inherits its descriptor.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from quire.config import RankGrid

_LINE_INTS = 16
_NUM_LINES = 128
# of the links between stages: a line for what was sent, and one for what was taken
_FIRST_LINK = 65
_NUM_SLOTS = 16
_CONNECTION_LOST = 2


class SharedMeeting:
    """Zeroed memory of so many bytes, or that of a descriptor."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.descriptor = descriptor
        if self.descriptor is None:
            self.descriptor = os.memfd_create("quire-ranks")
            os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)
        lines = np.frombuffer(self.memory, dtype=np.int32, count=_NUM_LINES * _LINE_INTS).reshape(_NUM_LINES, -1)
        self._counts = lines[:, 0]
        self._sleepers = lines[:, 1]

    def abort(self) -> None:
        """Nobody waits for another rank from here on: one of them will never come."""
        if not self._counts[0]:
            self._counts[0] = 1

    @property
    def is_aborted(self) -> bool:
        return bool(self._counts[0])

    @property
    def has_lost_others(self) -> bool:
        """A connection to a rank on another machine has closed (worker/crossing.py)."""
        return bool(self._counts[0] == _CONNECTION_LOST)

    def arrivals(self, size: int) -> list[int]:
        """How many times each rank has met the others."""
        arrivals: list[int] = self._counts[1 : 1 + size].tolist()
        return arrivals

    @property
    def has_sleepers(self) -> bool:
        """Somebody sleeps until another rank arrives."""
        return bool(self._sleepers[1:_FIRST_LINK].any())

    def is_waiting(self, stage: int, num_stages: int) -> bool:
        """Whether a stage sleeps until another one does something: sends, or takes what was sent."""
        before = _FIRST_LINK + 2 * (stage - 1)
        behind = _FIRST_LINK + 2 * stage
        has_nothing = stage > 0 and self._sleepers[before] > 0 and self._counts[before] == self._counts[before + 1]
        is_full = stage < num_stages - 1 and self._sleepers[behind + 1] > 0
        return bool(has_nothing or (is_full and self._counts[behind] - self._counts[behind + 1] >= _NUM_SLOTS))

    def close_descriptor(self) -> None:
        """The memory stays as long as somebody has it mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class GridMeetings:
    """The memory of each group of ranks, as the process has it that starts those of one machine."""

    def __init__(self, grid: RankGrid, num_bytes: Callable[[str, int], int], host: list[int] | None = None) -> None:
        """`num_bytes`: of a group in that direction, of so many ranks; `host`: the ranks of this machine, by default
        all."""
        self._grid = grid
        on_host = list(range(grid.size)) if host is None else host
        self.by_group: dict[tuple[int, ...], SharedMeeting] = {}
        # of a group that has ranks elsewhere too: by rank and direction, for that rank alone
        self._apart: dict[tuple[int, str], SharedMeeting] = {}
        for rank in on_host:
            for direction, members in grid.groups_of(rank).items():
                if not set(members) <= set(on_host):
                    self._apart[rank, direction] = SharedMeeting(num_bytes(direction, len(members)))
                elif tuple(members) not in self.by_group:
                    self.by_group[tuple(members)] = SharedMeeting(num_bytes(direction, len(members)))

    def of_rank(self, rank: int) -> dict[str, SharedMeeting]:
        """Those in which a rank takes part, by direction."""
        return {
            name: self._apart.get((rank, name)) or self.by_group[tuple(members)]
            for name, members in self._grid.groups_of(rank).items()
        }

    def crossings_of(self, rank: int) -> dict[str, list[int]]:
        """The members of those of its groups that have ranks elsewhere, by direction."""
        return {name: members for name, members in self._grid.groups_of(rank).items() if (rank, name) in self._apart}

    def abort(self) -> None:
        for meeting in self._all():
            meeting.abort()

    @property
    def is_aborted(self) -> bool:
        return any(meeting.is_aborted for meeting in self._all())

    @property
    def has_lost_others(self) -> bool:
        return any(meeting.has_lost_others for meeting in self._apart.values())

    def close_descriptors(self) -> None:
        for meeting in self._all():
            meeting.close_descriptor()

    def _all(self) -> list[SharedMeeting]:
        return [*self.by_group.values(), *self._apart.values()]

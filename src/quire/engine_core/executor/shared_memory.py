"""Memory that the ranks of one machine share: where the operators meet (`csrc/cpu/operators_ranks.cpp` draws it).

It has no name in any folder, so nothing is left behind by whoever dies: a rank inherits its descriptor.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

_LINE_INTS = 16


class SharedMeeting:
    """Zeroed memory of so many bytes, or that of a descriptor."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.descriptor = descriptor
        if self.descriptor is None:
            self.descriptor = os.memfd_create("quire-ranks")
            os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)
        self._counts = np.frombuffer(self.memory, dtype=np.int32, count=65 * _LINE_INTS)[::_LINE_INTS]

    def abort(self) -> None:
        """Nobody waits for another rank from here on: one of them will never come."""
        self._counts[0] = 1

    @property
    def is_aborted(self) -> bool:
        return bool(self._counts[0])

    def arrivals(self, size: int) -> list[int]:
        """How many times each rank has met the others."""
        arrivals: list[int] = self._counts[1 : 1 + size].tolist()
        return arrivals

    def close_descriptor(self) -> None:
        """The memory stays as long as somebody has it mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

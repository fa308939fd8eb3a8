"""Buddy allocation of a row of blocks: pieces whose sizes are powers of two, split in halves and joined again.

    [          8          |    4    |  2 | 1 ]      15 blocks begin as the powers of two of which they are the sum
    [ 4       |2 |1 |1 *  |    4    |  2 | 1 ]      a piece of 1 has been taken out of the first; its buddy is free

Two pieces of one size are buddies if they were one before, so a freed piece finds its buddy by its number alone.
"""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The least power of two that is as large."""
    return 1 << max(0, number - 1).bit_length()


class BuddySpace:
    """Numbers of blocks; knows nothing of what lies in them. The leftmost piece that fits is taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # by size: first blocks of the free pieces
        self._free: dict[int, set[int]] = {}
        start = 0
        for bit in reversed(range(num_blocks.bit_length())):
            size = 1 << bit
            if num_blocks & size:
                self._free.setdefault(size, set()).add(start)
                start += size

    def take(self, size: int) -> int | None:
        """The first block of a piece of this size, a power of two; None: no piece is large enough."""
        larger = min((one for one, starts in self._free.items() if one >= size and starts), default=None)
        if larger is None:
            return None
        start = min(self._free[larger])
        self._free[larger].remove(start)
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, set()).add(start + larger)
        return start

    def give_back(self, start: int, size: int) -> None:
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(start)

    def num_pieces(self, size: int) -> int:
        """How many pieces of this size could be taken now."""
        return sum(len(starts) * (one // size) for one, starts in self._free.items() if one >= size)

    @property
    def num_free(self) -> int:
        return sum(size * len(starts) for size, starts in self._free.items())

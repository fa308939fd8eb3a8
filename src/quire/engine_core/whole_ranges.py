"""Ranges of positions that are computed in one step or not at all: their tokens see each other.

Whatever ends in the middle of one (a grant, a prefix that was found) is taken back to its beginning. Owned by a
request; its rows refer to it. Knows neither why they belong together nor who asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class WholeRanges:
    """Of one prompt, [start, end) each, one behind the other. False if there are none."""

    def __init__(self, ranges: Sequence[tuple[int, int]] = ()) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def longest(self) -> int:
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)

    def taken_back(self, end: int) -> int:
        """`end`, or the beginning of the range that would be cut there."""
        index = bisect_right(self._ends, end)
        if index < len(self._starts):
            return min(end, self._starts[index])
        return end

    def blocks_back(self, num_blocks: int, block_size: int) -> int:
        """So many first blocks, or as many fewer as it takes to cut nothing."""
        while (end := self.taken_back(num_blocks * block_size)) < num_blocks * block_size:
            num_blocks = end // block_size
        return num_blocks

    def may_begin_at(self, position: int) -> bool:
        """It cuts nothing, or is the last of a range. That one sees no further than itself, so it may be asked for once
        more where all others are computed: forks do so."""
        return self.taken_back(position) == position or self.taken_back(position + 1) > position

    def length_at(self, position: int) -> int:
        """Tokens that are computed at once or not at all, from a position on that cuts nothing."""
        index = bisect_right(self._ends, position)
        if index < len(self._starts) and self._starts[index] == position:
            return self._ends[index] - position
        return 1

"""A block table: which physical blocks hold the tokens of one sequence in one group of layers (3.4.2).

An array that grows, so that a fork copies memory and loops over nothing. Owned by a Sequence; changed by the KV cache
manager alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Values

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]

# Stands where a sliding window has passed: nothing reads that block any more.
NO_BLOCK = -1


# never written: a table that grows gets an array of its own
_NO_BLOCKS: Blocks = np.empty(0, dtype=np.int64)


class BlockTable:
    """Entry i holds tokens [i * block_size, (i + 1) * block_size)."""

    __slots__ = ("_array", "length")

    def __init__(self, blocks: Values[int] | Blocks = ()) -> None:
        self.length = len(blocks)
        self._array: Blocks = np.array(blocks, dtype=np.int64) if self.length else _NO_BLOCKS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"block {index} of {self.length}")
        return int(self._array[index if index >= 0 else index + self.length])

    def __setitem__(self, index: int, block: int) -> None:
        if not 0 <= index < self.length:
            raise IndexError(f"block {index} of {self.length}")
        self._array[index] = block

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks.tolist())

    def __repr__(self) -> str:
        return f"BlockTable({self.blocks.tolist()})"

    @property
    def blocks(self) -> Blocks:
        """All entries, passed ones included; a view, of use until the table grows."""
        return self._array[: self.length]

    def held(self) -> Blocks:
        """The blocks that are really there."""
        blocks = self._array[: self.length]
        held: Blocks = blocks[blocks != NO_BLOCK]
        return held

    def extend(self, blocks: Values[int] | Blocks) -> None:
        length = self.length + len(blocks)
        if length > len(self._array):
            grown = np.empty(max(length, 2 * len(self._array), 16), dtype=np.int64)
            grown[: self.length] = self.blocks
            self._array = grown
        self._array[self.length : length] = blocks
        self.length = length

    def append(self, block: int) -> None:
        if self.length == len(self._array):
            self.extend([block])
            return
        self._array[self.length] = block
        self.length += 1

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def clear(self) -> None:
        self.length = 0

    def first(self, num_blocks: int) -> BlockTable:
        """A copy of the beginning."""
        return BlockTable(self.blocks[:num_blocks])

"""Who holds how much of a prompt: by the name of each block a set of replicas, as the bits of one number.

A replica that holds a block mostly holds those before it, because caches give the deepest block of a chain up first. So
the ends of what replicas hold are found by halving the prompt, not by walking along it. Looked at are its *marks*:
every length up to 128 blocks, every second one up to 256, every fourth one up to 512, and so on. That is exact to a
64th, and what a request costs here does not grow with its prompt: a million tokens have 700 marks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

_EXACT = 128


class HeldPrefixes:
    """What replicas have told of, and what is on its way to them with requests that have not ended."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        # with how many requests a block is on its way: (block, replica) -> count, and the same as bits
        self._num_coming: dict[tuple[int, int], int] = {}
        self._coming: dict[int, int] = {}
        self._bits: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._told)

    def stored(self, replica: int, blocks: Iterable[int]) -> None:
        told = self._told
        bit = self._bit(replica)
        for block in blocks:
            if told.setdefault(block, bit) is not bit:
                told[block] |= bit

    def _bit(self, replica: int) -> int:
        """One object of each replica, which all blocks share that nobody else holds: with a thousand of them a number
        takes more memory than its place."""
        return self._bits.setdefault(replica, 1 << replica)

    def removed(self, replica: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            _clear(self._told, block, 1 << replica)

    def cleared(self, replica: int) -> None:
        """It holds nothing any more; what is on its way stays so."""
        bit = 1 << replica
        for block in [block for block, holders in self._told.items() if holders & bit]:
            _clear(self._told, block, bit)

    def comes(self, replica: int, blocks: Sequence[int]) -> None:
        """A request with these blocks was sent there."""
        bit = self._bit(replica)
        for mark in _marks(len(blocks)):
            block = blocks[mark - 1]
            self._num_coming[block, replica] = self._num_coming.get((block, replica), 0) + 1
            if self._coming.setdefault(block, bit) is not bit:
                self._coming[block] |= bit

    def came(self, replica: int, blocks: Sequence[int]) -> None:
        """It is over: what has become of them the replica has told."""
        for mark in _marks(len(blocks)):
            block = blocks[mark - 1]
            left = self._num_coming.pop((block, replica)) - 1
            if left:
                self._num_coming[block, replica] = left
            else:
                _clear(self._coming, block, 1 << replica)

    def lengths(self, blocks: Sequence[int], replicas: int) -> Iterator[tuple[int, int]]:
        """(number of blocks, replicas that hold so many from the first on), of these replicas; those that hold none are
        left out."""
        told, coming = self._told, self._coming
        marks = _marks(len(blocks))
        # (marks that all of these hold, and the most that any may, these)
        open_parts = [(0, len(marks), replicas)]
        while open_parts:
            least, most, members = open_parts.pop()
            while least < most and members:
                middle = (least + most + 1) // 2
                block = blocks[marks[middle - 1] - 1]
                have = (told.get(block, 0) | coming.get(block, 0)) & members
                if have != members and have:
                    open_parts.append((least, middle - 1, members & ~have))
                if have:
                    least = middle
                    members = have
                else:
                    most = middle - 1
            if least and members:
                yield marks[least - 1], members


_known_marks = list(range(1, _EXACT + 1))


def _marks(length: int) -> list[int]:
    """Those of a prompt of so many blocks."""
    while _known_marks[-1] < length:
        last = _known_marks[-1]
        # as many again in what is twice as long
        step = 2 * last // _EXACT
        _known_marks.extend(range(last + step, 2 * last + 1, step))
    return _known_marks[: bisect_right(_known_marks, length)]


def _clear(holders: dict[int, int], block: int, bit: int) -> None:
    left = holders.get(block, 0) & ~bit
    if left:
        holders[block] = left
    else:
        holders.pop(block, None)

"""The first part of a list that grows, as it stood: hooks look at it in their threads, and nothing need be copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class FirstPart(Sequence[int]):
    """Never changes, because what is there of the list never does."""

    __slots__ = ("_length", "_numbers")

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._length = len(numbers)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return self._numbers[start : max(start, stop) : step] if step > 0 else self._numbers[: self._length][place]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        return self._numbers[place % self._length]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(self[:])

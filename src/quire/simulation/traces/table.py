"""A trace that was read: columns of times and lengths. What is wrong with a file is said with its line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from quire.errors import UserError
from quire.simulation.arrivals import Arrival

# Longer than any model's context; a column that was taken for another one is.
_MOST_TOKENS = 10**8
# A line. In Mooncake's form a prompt of the most tokens has a megabyte or two.
_MOST_CHARACTERS = 1 << 24
# leading zeros and all; Python refuses to read thousands
_MOST_DIGITS = 40


class TraceError(UserError):
    """A file of arrivals that cannot be used."""


@dataclass(frozen=True)
class ReadTrace:
    """All arrivals, by time, from second 0 on."""

    name: str
    table: tuple[Arrival, ...]
    has_contents: bool = False

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.table)


def lines_of(path: Path) -> Iterator[str]:
    """One at a time. A file without ends of lines is no trace, and is not read to its end."""
    with path.open(newline="", encoding="utf-8") as file:
        for number in count(1):
            line = file.readline(_MOST_CHARACTERS + 1)
            if len(line) > _MOST_CHARACTERS:
                raise TraceError(f"{path}, line {number}: has more than {_MOST_CHARACTERS:,} characters.")
            if not line:
                return
            yield line


def in_order(name: str, table: list[Arrival], *, has_contents: bool = False) -> ReadTrace:
    """Sorted by time; equal times keep their order. The first one arrives at second 0."""
    if not table:
        raise TraceError(f"{name}: there is no request in it.")
    table.sort(key=lambda one: one.at)
    start = table[0].at
    shifted = tuple(arrival.moved_to(arrival.at - start) for arrival in table) if start else tuple(table)
    return ReadTrace(name, shifted, has_contents)


def whole_number(place: str, name: str, value: object, least: int = 0) -> int:
    """A count of tokens, from a field that may be text."""
    is_digits = isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS
    number = value if type(value) is int else int(str(value)) if is_digits else -1
    if not least <= number <= _MOST_TOKENS:
        raise TraceError(f"{place}: {name}={str(value)[:40]!r} must be a whole number from {least} to {_MOST_TOKENS}.")
    return number

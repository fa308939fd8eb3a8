"""What one rendering of a chat template may spend: steps, bytes, and what each operation may make.

A template comes with a checkpoint, so it is foreign code, and a few words of it can ask for any amount of work. So
loops, calls, comparisons and filters are steps that are counted, and each value that is made is weighed. An operation
whose result can be much larger than what it is given is weighed before it is done. Counts decide, so a template that is
refused is refused on every machine; the clock decides only what no count has stopped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError

_EMPTY: dict[str, str] = {}
_VIEWS: tuple[Any, ...] = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, *_VIEWS)
_SIZED: tuple[Any, ...] = (*_CONTAINERS, range)
_ITERATORS = (GeneratorType, reversed)
# A list's place for an element, and a small object in it.
_ELEMENT_BYTES = 64
_MOST_BYTES_OF_VALUE = 16 << 20
# Greater ones may all have one hash, and a table of them takes the square of their number to make.
_MOST_BITS = 60
# Comparisons of one character each, which an operation that looks for one text in another makes at worst.
_MOST_COMPARISONS = 1 << 28
# Every 32nd step looks at the clock.
_LOOK_BITS = 5
_LOOK_MASK = (1 << _LOOK_BITS) - 1
# Characters that an operation goes through in the time of a step.
_STEP_CHARACTERS_BITS = 7
_PLAIN = frozenset({int, bool, float, type(None)})
_MOST_CHARACTERS = 16_000_000
_PIECES_AT_ONCE = 1_024
_ONLY_TEXT = {str}


class TemplateBudgetError(SecurityError):
    """The template spends more than it may."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a rendering may spend."""

    steps: int
    num_bytes: int
    seconds: float


# A call takes longer than the comparison that is one step.
STEPS_OF_CALL = 8
# 4,000 messages take some 300,000 steps; 4 million take a few seconds.
WHOLE = Allowance(steps=4_000_000, num_bytes=96 << 20, seconds=20.0)
# So little that other work can wait for it.
BRIEF = Allowance(steps=16_000, num_bytes=1 << 20, seconds=0.015)


class Budget:
    """Of one rendering, in one thread."""

    __slots__ = ("_allowance", "_bytes", "_deadline", "_steps", "_weights")

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._steps = allowance.steps
        self._bytes = allowance.num_bytes
        self._deadline = time.monotonic() + allowance.seconds
        # Of each container that was weighed, which is kept so that its id stays its own. Templates cannot change one.
        self._weights: dict[int, tuple[Any, int]] = {}

    def step(self) -> bool:
        """True, so that it can stand before an `and`."""
        self._steps -= 1
        return bool(self._steps & _LOOK_MASK) or self._look()

    def _look(self) -> bool:
        if self._steps <= 0:
            raise TemplateBudgetError(f"it takes more than {self._allowance.steps:,} steps")
        if time.monotonic() > self._deadline:
            raise TemplateBudgetError(f"it takes longer than {self._allowance.seconds:g} s")
        return True

    def spend(self, steps: int) -> None:
        before = self._steps
        self._steps -= steps
        if self._steps <= 0 or self._steps >> _LOOK_BITS != before >> _LOOK_BITS:
            self._look()

    def take(self, num_bytes: int) -> None:
        self._bytes -= num_bytes
        if self._bytes < 0:
            raise TemplateBudgetError(f"it makes more than {self._allowance.num_bytes:,} bytes of text and lists")

    def check_room(self, num_bytes: float) -> None:
        """Before something is made that may become so large."""
        if num_bytes > min(self._bytes, _MOST_BYTES_OF_VALUE):
            most = min(self._allowance.num_bytes, _MOST_BYTES_OF_VALUE)
            raise TemplateBudgetError(f"it would make a value of more than {most:,} bytes")

    # ------------------------------------------------------------------------------------------ values

    def made(self, value: Any) -> Any:
        """The value, when it has been counted; what makes values one after another is counted while it does."""
        kind = type(value)
        if kind is str:
            self.take(_bytes_of(value))
        elif kind is int:
            self._check_bits(value.bit_length())
        elif kind in _PLAIN:
            pass
        elif kind is range:
            self._check_bits(max(value.start.bit_length(), value.stop.bit_length()))
        elif isinstance(value, _CONTAINERS):
            self.weight(value)
            self.take(_ELEMENT_BYTES * (1 + len(value)))
        elif isinstance(value, str):
            self.take(_bytes_of(value))
        elif isinstance(value, _ITERATORS):
            return self._counted(value)
        return value

    def copied(self, value: Any) -> Any:
        """A part of what there is already."""
        if isinstance(value, str):
            self.take(_bytes_of(value))
        elif isinstance(value, (list, tuple)):
            self.take(_ELEMENT_BYTES * (1 + len(value)))
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def weight(self, value: Any) -> int:
        """Bytes of its text and elements, each as often as it is reached: a list may hold one thing many times."""
        if isinstance(value, str):
            return _bytes_of(value)
        if not isinstance(value, _CONTAINERS):
            return _ELEMENT_BYTES
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        self.spend(1 + len(value) // 4)
        weight = _ELEMENT_BYTES * (1 + len(value)) + sum(map(self.weight, value))
        if isinstance(value, dict):
            weight += sum(map(self.weight, value.values()))
        if weight > _MOST_BYTES_OF_VALUE:
            raise TemplateBudgetError(f"it makes a list or object that stands for over {_MOST_BYTES_OF_VALUE:,} bytes")
        self._weights[id(value)] = value, weight
        return weight

    def given(self, values: Iterable[Any]) -> None:
        """What a call is given: it becomes a list that a macro can keep."""
        values = list(values)
        self.spend(len(values))
        weight = sum(self.weight(value) for value in values if isinstance(value, _CONTAINERS))
        if weight:
            self.check_room(weight)

    def listed(self, value: Any) -> Any:
        """What is reached one by one, at once, so that it can be weighed."""
        return list(self._counted(value)) if isinstance(value, _ITERATORS) else value

    def look_through(self, value: Any) -> None:
        """What goes through all of a value takes steps by its length."""
        if isinstance(value, str):
            self.spend(len(value) >> _STEP_CHARACTERS_BITS)
        elif isinstance(value, _SIZED):
            self.spend(len(value))

    def looked(self, value: Any) -> Any:
        self.look_through(value)
        return value

    # ------------------------------------------------------------------------------------------ joining

    def joined(self, values: Iterable[Any]) -> str:
        """`a ~ b`."""
        texts = [*map(self.text, values)]
        self.check_room(sum(map(_bytes_of, texts)))
        text = "".join(texts)
        self.take(_bytes_of(text))
        return text

    def text(self, value: Any) -> str:
        """What is written of a value."""
        if isinstance(value, str):
            return value
        if isinstance(value, _CONTAINERS):
            self.check_room(4 * self.weight(value))
            self.take(4 * self.weight(value))
        return str(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """Jinja joins everything through this: the output, and what a macro returns."""
        if type(pieces) is not list:
            pieces = self._gathered(pieces)
        size = _ELEMENT_BYTES * len(pieces) + sum(map(len, pieces))
        if size > _MOST_CHARACTERS:
            self._check_characters(sum(map(len, pieces)))
        text = "".join(pieces)
        self.take(size if text.isascii() else 4 * size)
        return text

    def _gathered(self, pieces: Iterable[str]) -> list[str]:
        pieces = iter(pieces)
        kept: list[str] = []
        size = 0
        while some := list(islice(pieces, _PIECES_AT_ONCE)):
            size += _ELEMENT_BYTES * len(some) + sum(map(len, some))
            # what the pieces are made by takes from the same bytes meanwhile
            if size > self._bytes:
                self.take(size)
            kept += some
        return kept

    @staticmethod
    def _check_characters(num_characters: int) -> None:
        if num_characters > _MOST_CHARACTERS:
            raise TemplateBudgetError(f"it writes more than {_MOST_CHARACTERS:,} characters")

    def add(self, *values: Any) -> Any:
        """`a + b + c`, few of them."""
        if {*map(type, values)} == _ONLY_TEXT:
            text = "".join(values)
            self.take(len(text) if text.isascii() else 4 * len(text))
            return text
        total = values[0]
        for value in values[1:]:
            if isinstance(total, (str, list, tuple)):
                self.check_room(self.weight(total) + self.weight(value))
            total = self.made(total + value)
        return total

    # ------------------------------------------------------------------------------------------ operators

    def check_power(self, base: Any, exponent: Any) -> None:
        if isinstance(base, int) and isinstance(exponent, int):
            self._check_bits(base.bit_length() * exponent)

    def check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length())
        elif isinstance(right, int):
            self.check_room(self.weight(left) * max(0, right))
        elif isinstance(left, int):
            self.check_room(self.weight(right) * max(0, left))

    def _check_bits(self, num_bits: int) -> None:
        if num_bits > _MOST_BITS:
            raise TemplateBudgetError(f"it makes a number of more than {_MOST_BITS:,} bits")

    def check_search(self, text: str, part: Any) -> None:
        """Of what looks for a text from the end, or for one of many characters."""
        if isinstance(part, str) and len(text) * len(part) > _MOST_COMPARISONS:
            raise TemplateBudgetError("it looks for a long text in a long text from its end")

    def check_format(self, text: str, arguments: Iterable[Any]) -> None:
        """Of `%` and `format`: as many fields as there are signs of one, each as wide as the widest."""
        arguments = list(arguments)
        num_fields = text.count("%") + text.count("{")
        widths = [int(digits[:9]) for digits in re.findall(r"\d{4,}", text)]
        if "*" in text or re.search(r"\{[^}]*\{", text):
            # a width may be an argument, also one inside an argument
            widths += [abs(value) for value in _flat(arguments) if isinstance(value, int)]
        widest = max(widths, default=1_000) + 4 * max(map(self.weight, arguments), default=0)
        self.check_room(_bytes_of(text) + num_fields * widest)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value

"""Texts of clients that hold the marks of a chat, such as <|im_end|>: they stay text, so that nobody can forge a turn.

A mark is cut in two by a letter of Unicode's private use that no message holds. It passes through the template as any
other letter does; the rendered text is cut at it, and the pieces are tokenised one by one, so none of them is a mark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

from quire.errors import RequestError

_FIRST_PRIVATE = 0xE000
_LAST_PRIVATE = 0xF8FF
_PRIVATE = re.compile(f"[{chr(_FIRST_PRIVATE)}-{chr(_LAST_PRIVATE)}]")
# behind the one that marks the end of a last message (chat_template.py)
_FIRST = _FIRST_PRIVATE + 1


class Quoting:
    """For one chat: `quote` its parts, render them, and take the text apart with `pieces`."""

    def __init__(self, marks: Collection[str], *parts: Any) -> None:
        # a mark of one letter cannot be cut
        self._pattern = _pattern_of(frozenset(mark for mark in marks if len(mark) > 1))
        self.cut = ""
        if self._pattern is not None and any(_holds(self._pattern, part) for part in parts):
            self.cut = unused_letter(parts)

    def quote(self, value: Any) -> Any:
        """The same value; every mark in its texts is cut."""
        if not self.cut:
            return value
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, dict):
            return {self._quoted(key): self.quote(item) for key, item in value.items()}
        if isinstance(value, list):
            return self._without_seams([self.quote(item) for item in value])
        return value

    def _quoted(self, text: str) -> str:
        assert self._pattern is not None
        # what is left may be a mark again, where one begins inside another
        while self._pattern.search(text):
            text = self._pattern.sub(lambda found: found[0][0] + self.cut + found[0][1:], text)
        return text

    def _without_seams(self, parts: list[Any]) -> list[Any]:
        """Parts of a content that a template may join: no mark comes about where two of them meet."""
        for part in parts[:-1]:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += self.cut
        return parts

    def pieces(self, rendered: str) -> list[str]:
        return rendered.split(self.cut) if self.cut else [rendered]


@lru_cache(maxsize=8)
def _pattern_of(marks: frozenset[str]) -> re.Pattern[str] | None:
    if not marks:
        return None
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _holds(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, list):
        # parts that a template may join
        joined = "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
        return pattern.search(joined) is not None or any(_holds(pattern, item) for item in value)
    if isinstance(value, dict):
        return any(_holds(pattern, item) for pair in value.items() for item in pair)
    return isinstance(value, str) and pattern.search(value) is not None


def unused_letter(parts: Any) -> str:
    """A letter of private use that occurs nowhere in what a client wrote."""
    used = {letter for text in _texts(parts) for letter in _PRIVATE.findall(text)}
    for code in range(_FIRST, _LAST_PRIVATE + 1):
        if chr(code) not in used:
            return chr(code)
    raise RequestError(
        "messages: a special token of the model stands in them, and all 6,399 letters of Unicode's private use, so "
        "none is left to keep that token text. Leave out one or the other.",
        param="messages",
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            for item in pair:
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)

"""What was found in an answer, in order: text for the user, reasoning, and calls of tools.

Owns white space that may turn out to stand beside a call or around reasoning, where it means nothing and is dropped.
What comes out depends on the whole text alone, not on how it was cut. Written by a Reader, read by an OutputParser.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

# No tool can have another name (interfaces/server/openai/chat_tools.py refuses it).
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# White space that is held back; of a longer run the beginning is text like any other.
_MAX_HELD_SPACE = 256


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote for itself."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool is called. Its arguments follow."""

    index: int
    name: str
    id: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next part of a call's arguments, which are one JSON object in all."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Malformed(Exception):  # noqa: N818 - no error: what a format does not know is plain text
    """What follows is not in this format. Never leaves this package."""


class _Lane:
    """One kind of text, without the white space at its borders."""

    def __init__(self, emit: Callable[[str], None], *, is_border: bool) -> None:
        self._emit = emit
        self._held = ""
        # the next white space stands at a border
        self._is_border = is_border

    def write(self, text: str) -> None:
        if self._is_border:
            text = text.lstrip()
            if not text:
                return
            self._is_border = False
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._emit(shown)
        while len(self._held) >= _MAX_HELD_SPACE:
            self._emit(self._held[:_MAX_HELD_SPACE])
            self._held = self._held[_MAX_HELD_SPACE:]

    def border(self) -> None:
        self._held = ""
        self._is_border = True

    def finish(self) -> None:
        if self._held:
            self._emit(self._held)
            self._held = ""


class Answer:
    """`take` hands out what is new."""

    def __init__(self, new_id: Callable[[], str], *, max_calls: int | None = None) -> None:
        self._pieces: list[Piece] = []
        self._new_id = new_id
        self._ids: set[str] = set()
        self._max_calls = max_calls
        self._content = _Lane(lambda text: self._pieces.append(Content(text)), is_border=False)
        self._reasoning = _Lane(lambda text: self._pieces.append(Reasoning(text)), is_border=True)
        self.num_calls = 0
        self.is_in_call = False
        # a call began whose arguments are no whole JSON object; what was sent of it cannot be taken back
        self.has_broken_call = False

    def content(self, text: str) -> None:
        self._content.write(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.write(text)

    def end_reasoning(self) -> None:
        """What follows is for the user, or another thought."""
        self._reasoning.border()
        self._content.border()

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """`call_id`: where the model gives its calls ids. Two calls never have the same."""
        if not _NAME.fullmatch(name):
            raise Malformed
        self._content.border()
        self.is_in_call = True
        self.num_calls += 1
        if self._is_shown:
            if call_id is None or call_id in self._ids:
                call_id = self._new_id()
            self._ids.add(call_id)
            self._pieces.append(CallStart(self.num_calls - 1, name, call_id))

    def arguments(self, text: str) -> None:
        if self._is_shown and text:
            self._pieces.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        self.is_in_call = False

    def break_call(self) -> None:
        self.is_in_call = False
        self.has_broken_call |= self._is_shown

    def finish(self) -> None:
        self._content.finish()
        if self.is_in_call:
            self.break_call()

    def take(self) -> list[Piece]:
        """What came since the last time; neighbours of a kind are one piece."""
        if not self._pieces:
            return []
        merged: list[Piece] = []
        parts: list[str] = []
        for piece, following in zip(self._pieces, [*self._pieces[1:], None], strict=True):
            if isinstance(piece, CallStart):
                merged.append(piece)
                continue
            parts.append(piece.text)
            if not _goes_on(piece, following):
                merged.append(msgspec.structs.replace(piece, text="".join(parts)))
                parts = []
        self._pieces = []
        return merged

    @property
    def _is_shown(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


def _goes_on(piece: Piece, following: Piece | None) -> bool:
    if isinstance(piece, CallArguments) and isinstance(following, CallArguments):
        return piece.index == following.index
    return type(piece) is type(following)

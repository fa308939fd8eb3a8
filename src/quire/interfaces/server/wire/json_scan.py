"""What a JSON text will become is counted in its bytes, before anything is made of it.

Decoding holds the event loop, and what it takes depends on how many values there are, far more than on how long the
text is: 8 MiB are one string in 7 ms, or two million lists in 300. So values, names and depth have bounds, and a text
is counted piece by piece while it arrives. Punctuation outside of strings is all that has to be looked at; everything
here is done by functions that take a piece at once, 2 to 8 ms for a MiB.

Says nothing of whether the text is JSON: the decoder does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.interfaces.server.wire.errors import invalid

# every byte that is no bracket, and what the brackets do to the depth
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """The most of each that one text may hold. Values are members and elements, and objects and lists once more."""

    values: int = 2**17
    names: int = 2**15
    depth: int = 64


class JsonScan:
    """Counts what was fed so far; raises ApiError at the first piece in which a bound is passed."""

    def __init__(self, bounds: JsonBounds, what: str = "body") -> None:
        self._bounds = bounds
        self._what = what
        self._is_in_string = False
        # a backslash whose other half is in the next piece
        self._rest = b""
        self.num_values = self.num_names = self.depth = 0

    def feed(self, piece: bytes) -> None:
        text = (self._rest + piece).replace(rb"\\", b"")
        self._rest = text[len(text) - text.endswith(b"\\") :]
        # what is behind an odd number of backslashes ends no string
        parts = text.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        brackets = outside.translate(None, _NO_BRACKETS)
        self.num_names += outside.count(b":")
        self.num_values += outside.count(b",") + brackets.count(b"[") + brackets.count(b"{")
        deepest = self._deepest(brackets)
        self._check(deepest)

    def _deepest(self, brackets: bytes) -> int:
        if not brackets:
            return self.depth
        steps = np.frombuffer(brackets.translate(_STEPS), dtype=np.int8)
        depths = self.depth + np.cumsum(steps, dtype=np.int64)
        self.depth = int(depths[-1])
        return int(depths.max())

    def _check(self, deepest: int) -> None:
        bounds = self._bounds
        what = self._what
        if deepest > bounds.depth:
            raise invalid(f"The {what} is nested more than {bounds.depth} levels deep.")
        if self.num_names > bounds.names:
            text = (
                f"The {what} has more than {bounds.names:,} names in its objects, which is more than any request needs."
            )
            raise invalid(f"{text} Leave out what is not meant for the server.")
        if self.num_values > bounds.values:
            text = f"The {what} has more than {bounds.values:,} values in lists and objects. Others would wait for it."
            raise invalid(f"{text} Send texts instead of token ids, or several requests.")


def check_json(data: bytes, bounds: JsonBounds, what: str) -> None:
    """A text that is there as a whole."""
    JsonScan(bounds, what).feed(data)

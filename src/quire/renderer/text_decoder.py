"""Tokens to text, piece by piece: two kinds, and two for special cases, with the same two verbs, `push` and `finish`.

ByteDecoder serves every tokenizer whose tokens mean fixed bytes; WindowDecoder serves the rest by decoding a short
window of tokens again. Neither ever emits a part of a character, nor text of the prompt; both are linear in time, also
on a stream of invalid bytes. Owned by a TextStream.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.renderer.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three tokens before its last one.
_MAX_HELD_TOKENS = 4
_NUM_CONTEXT_TOKENS = 5


class TextDecoder(Protocol):
    """Incremental detokenising of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, as U+FFFD."""

    @property
    def is_open(self) -> bool:
        """Something of what was pushed is held back."""


class SilentDecoder:
    """Gives no text: for requests with detokenize=False, and for models without a tokenizer."""

    is_open = False

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class ByteDecoder:
    """A concatenation of bytes, decoded as UTF-8; what is held back is at most three bytes of one character."""

    __slots__ = ("_bytes_by_token", "_first", "_is_skipped", "_pending")

    def __init__(
        self,
        bytes_by_token: TokenBytes,
        pending: bytes = b"",
        first: Callable[[int], bytes] | None = None,
        is_skipped: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._bytes_by_token = bytes_by_token
        self._pending = pending
        # set until the first token that is not skipped has come
        self._first = first
        self._is_skipped = is_skipped

    def push(self, token_ids: Sequence[int]) -> str:
        if self._first is not None:
            data = self._start(token_ids)
        elif len(token_ids) == 1:
            data = self._bytes_by_token[token_ids[0]]
        else:
            data = b"".join([self._bytes_by_token[token_id] for token_id in token_ids])
        if self._pending:
            data = self._pending + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    @property
    def is_open(self) -> bool:
        return bool(self._pending)

    def _start(self, token_ids: Sequence[int]) -> bytes:
        pieces = []
        for token_id in token_ids:
            if self._first is not None and not self._is_skipped(token_id):
                pieces.append(self._first(token_id))
                self._first = None
            else:
                pieces.append(self._bytes_by_token[token_id])
        return b"".join(pieces)


class ContinuedCharacter:
    """Takes the place of a ByteDecoder while the prompt's last, unfinished character is open.

    If the output goes on with that character, it is emitted whole; if not, nothing of the prompt appears, not even as
    a replacement character.
    """

    def __init__(self, bytes_by_token: TokenBytes, prompt_tail: bytes) -> None:
        self._bytes_by_token = bytes_by_token
        self._tail = prompt_tail
        self._data = b""
        self._decoder: ByteDecoder | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        if self._decoder is not None:
            return self._decoder.push(token_ids)
        self._data += b"".join([self._bytes_by_token[token_id] for token_id in token_ids])
        if not self._data:
            return ""
        # The first byte decides whether the output goes on with the prompt's character.
        continues = utf_8_decode(self._tail + self._data[:1], "replace", False)[0][:1] != REPLACEMENT
        self._decoder = ByteDecoder(self._bytes_by_token, (self._tail if continues else b"") + self._data)
        return self._decoder.push(())

    def finish(self) -> str:
        return self._decoder.finish() if self._decoder is not None else ""

    @property
    def is_open(self) -> bool:
        return self._decoder is not None and self._decoder.is_open


class WindowDecoder:
    """Decodes the last few tokens again and emits what is new: for decoders that look at a token's neighbours."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        text = decode(context)
        # A prompt that ends within a character is no context: its bytes would come out again.
        self._context, self._context_text = ([], "") if text.endswith(REPLACEMENT) else (context, text)
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_open = text.endswith(REPLACEMENT) or len(text) <= len(self._context_text)
        return "" if is_open and len(self._held) < _MAX_HELD_TOKENS else self._emit(text)

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        # What was just emitted is the next window's context: it stays short whatever comes.
        self._context = self._held
        self._held = []
        self._context_text = self._decode(self._context)
        return new

    def finish(self) -> str:
        return self._emit(self._decode(self._context + self._held)) if self._held else ""

    @property
    def is_open(self) -> bool:
        return bool(self._held)


def unfinished_character(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not end it."""
    tail = data[-3:]
    for start in range(max(0, len(tail) - 3), len(tail)):
        text, num_used = utf_8_decode(tail[start:], "ignore", False)
        if not text and num_used == 0:
            return tail[start:]
    return b""

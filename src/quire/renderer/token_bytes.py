"""The bytes that each token stands for, when they do not depend on its neighbours.

Owns the reading of a tokenizer's decoder: for the kinds that language models use (byte-level, and the SentencePiece
family with or without byte fallback) a token always means the same bytes, so text is a concatenation of bytes and a
stream of it costs one look-up a token. Other kinds are not recognised here and take the slower WindowDecoder.
Must never guess: a table that disagrees with the tokenizer on a sample of its vocabulary is not used.
Called by Tokenizer when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

BytesOf = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled at first use: a vocabulary of 150,000 entries costs nothing at start."""

    def __init__(
        self, token_of: Callable[[int], str | None], bytes_of: BytesOf, skipped: Collection[int] = frozenset()
    ) -> None:
        super().__init__()
        self._token_of = token_of
        self._bytes_of = bytes_of
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        # An id without a token (a model's padded vocabulary) leaves no text.
        token = None if token_id in self._skipped else self._token_of(token_id)
        data = b"" if token is None else self._bytes_of(token)
        self[token_id] = data
        return data


@dataclass(frozen=True)
class ByteDecoding:
    """How a token becomes bytes: anywhere in a text, and as its first token, which may lose a leading space."""

    bytes_of: BytesOf
    bytes_of_first: BytesOf


def recognise(decoder: dict[str, Any] | None) -> ByteDecoding | None:
    """The decoding that a tokenizer.json's `decoder` describes, or None if a token's text depends on its neighbours."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    others = [step for step in steps if step["type"] != "Fuse"]
    if [step["type"] for step in others] == ["ByteLevel"]:
        return ByteDecoding(byte_level_bytes, byte_level_bytes)
    if [step["type"] for step in others] == ["Metaspace"]:
        return _metaspace(others[0])
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece(steps)
    return None


def _metaspace(step: dict[str, Any]) -> ByteDecoding:
    mark = step["replacement"]

    def anywhere(token: str) -> bytes:
        return token.replace(mark, " ").encode()

    def first(token: str) -> bytes:
        return token.replace(mark, "").encode()

    return ByteDecoding(anywhere, anywhere if step.get("prepend_scheme") == "never" else first)


def _sentencepiece(steps: list[dict[str, Any]]) -> ByteDecoding | None:
    """Replacements in each token, then bytes, then perhaps one space less at the start of the whole text."""
    replacements: list[tuple[str, str]] = []
    has_bytes = is_fused = False
    stripped = ""
    for step in steps:
        if step["type"] == "Replace" and not (has_bytes or is_fused) and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "ByteFallback" and not is_fused:
            has_bytes = True
        elif step["type"] == "Fuse":
            is_fused = True
        elif step["type"] == "Strip" and is_fused and step["start"] <= 1 and step["stop"] == 0 and not stripped:
            stripped = step["content"] if step["start"] else ""
        else:
            return None

    def anywhere(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return bytes([int(match.group(1), 16)]) if match else token.encode()

    def first(token: str) -> bytes:
        return anywhere(token).removeprefix(stripped.encode())

    return ByteDecoding(anywhere, first if stripped else anywhere)


@lru_cache(maxsize=1)
def _byte_by_letter() -> dict[str, int]:
    """The letters that byte-level BPE writes for the 256 bytes: printable ones for themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_bytes(token: str) -> bytes:
    """A token with a letter that stands for no byte is a text as it is (an added token such as `ab cd`)."""
    letters = _byte_by_letter()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()

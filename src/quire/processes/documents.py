"""What a process is told when it starts: read from standard input, so that no secret shows in `ps`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

_LENGTH_BYTES = 8
T = TypeVar("T")


def encode_document(document: msgspec.Struct) -> bytes:
    """Its length, then MessagePack: unlike JSON it has an infinity, which config.json files may hold."""
    data = msgspec.msgpack.encode(document, enc_hook=_encode_path)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def read_document(file: BinaryIO, kind: type[T]) -> T:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(file.read(length), type=kind, dec_hook=_decode_path)


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be told to another process")


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise TypeError(f"{kind.__name__} cannot be read from a parent")

"""Structs as JSON answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

# what is sent at once
_BYTES_OF_PIECE = 64 * 1024


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def long_json_answer(value: Any, name: str) -> Response:
    """The field of this name is a list that may be long, or an object of such lists: entries are encoded and sent one
    after the other, so that others have their turn. An answer of a hundred choices with log-probabilities has 40 MB."""
    return _InPieces(await pieces_of(value, name))


async def pieces_of(value: Any, name: str) -> list[bytes]:
    """The same, for whoever has no connection."""
    long: Any = getattr(value, name, ())
    is_object = isinstance(long, msgspec.Struct)
    if not is_object and len(long) < 2:
        return [msgspec.json.encode(value)]
    empty: Any = type(long)() if is_object else []
    setattr(value, name, empty)
    # no text holds this: quotes in texts are escaped
    field = b'"%b":%b' % (name.encode(), msgspec.json.encode(empty))
    head, _, tail = msgspec.json.encode(value).partition(field)
    pieces: list[bytes] = []
    piece = bytearray(head + field[:-1])
    for opening, entries, closing in _lists_of(long) if is_object else [(b"", long, b"")]:
        piece += opening
        for number, entry in enumerate(entries):
            if number:
                piece += b","
            piece += msgspec.json.encode(entry)
            if len(piece) >= _BYTES_OF_PIECE:
                pieces.append(bytes(piece))
                piece.clear()
                await asyncio.sleep(0)
        piece += closing
    pieces.append(bytes(piece + field[-1:] + tail))
    return pieces


def _lists_of(lists: msgspec.Struct) -> Iterator[tuple[bytes, Iterable[Any], bytes]]:
    """What stands before the entries of each, the entries, and what stands behind them."""
    comma = b""
    for field in msgspec.structs.fields(lists):
        entries = getattr(lists, field.name)
        if entries is not msgspec.UNSET:
            yield b'%b"%b":[' % (comma, field.encode_name.encode()), entries, b"]"
            comma = b","


class JsonArray:
    """A list that is JSON already: however long it becomes, it is one object, and is given back at once."""

    def __init__(self) -> None:
        self._data = bytearray(b"[")

    def extend(self, values: Sequence[Any]) -> bytes:
        """These as JSON, as a list of their own."""
        encoded = msgspec.json.encode(values)
        if values:
            if len(self._data) > 1:
                self._data += b","
            self._data += encoded[1:-1]
        return encoded

    def value(self) -> Any:
        """For the struct that it is part of. Nothing may follow."""
        self._data += b"]"
        return msgspec.Raw(self._data)


class _InPieces(Response):
    """A body that is there, and is handed to the transport piece by piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        length = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(length)}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

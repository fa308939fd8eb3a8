"""multipart/form-data (RFC 7578) as it arrives: the parts' names, and their bytes piece by piece.

Owns the form on the wire and the bounds of everything but the contents: a few kilobytes are held, however large a part
is. Whoever reads the parts decides where their bytes go and how many may come.
"""

from __future__ import annotations

import email.message
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from quire.interfaces.server.wire.errors import ApiError, invalid

# RFC 2046: at most 70 characters, of which the last is no space
_BOUNDARY = re.compile(r"""[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]""")
_MAX_PARTS = 16
_MAX_HEAD_BYTES = 8 * 1024
# of a header: the standard library looks again at all that stands before each of them
_MAX_PARAMETERS = 32
_MAX_PREAMBLE_BYTES = 8 * 1024
_LINE_END = b"\r\n"


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part. Its bytes follow."""

    name: str
    # as the client wrote it, or None for a field that is no file; data, never a path
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type announces, or ApiError."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        shown = repr(content_type[:64]) if content_type else "missing"
        raise ApiError(415, f"Content-Type is {shown}; a file is uploaded as multipart/form-data.")
    boundary = _parameters("content-type", content_type).get_boundary()
    if not boundary or not _BOUNDARY.fullmatch(boundary):
        raise invalid("Content-Type: multipart/form-data needs a boundary of 1 to 70 letters, digits or signs.")
    return boundary.encode()


async def read_parts(chunks: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[Part | bytes, None]:
    """Each part as a Part and then its bytes in pieces, in the order of the body."""
    window = _Window(chunks)
    delimiter = b"\r\n--" + boundary
    await window.take_until(delimiter, _MAX_PREAMBLE_BYTES, "before its first boundary")
    for _ in range(_MAX_PARTS):
        rest_of_line = await window.take_until(_LINE_END, 80, "in the line of a boundary")
        if rest_of_line.strip():
            raise invalid("The multipart body is broken: something stands behind a boundary.")
        yield _part_of(await window.take_until(b"\r\n\r\n", _MAX_HEAD_BYTES, "in the head of a part"))
        async for piece in window.pieces_until(delimiter):
            yield piece
        if await window.begins_with(b"--"):
            return
    raise invalid(f"The multipart body has more than {_MAX_PARTS} parts.")


class _Window:
    """The bytes that were not taken yet."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        # the first boundary stands at the beginning of the body, and has no line end before it
        self._bytes = bytearray(_LINE_END)

    async def pieces_until(self, mark: bytes) -> AsyncGenerator[bytes, None]:
        """What comes before the mark, as it arrives; the mark is taken with it."""
        while (at := self._bytes.find(mark)) < 0:
            # the mark may begin in the last bytes
            safe = len(self._bytes) - len(mark) + 1
            if safe > 0:
                yield self._taken(safe)
            await self._wait_more()
        if at:
            yield self._taken(at)
        del self._bytes[: len(mark)]

    async def take_until(self, mark: bytes, limit: int, where: str) -> bytes:
        """The same as one, if it is not longer than the limit."""
        while (at := self._bytes.find(mark)) < 0:
            if len(self._bytes) > limit:
                raise invalid(f"The multipart body is broken: more than {limit} bytes {where}.")
            await self._wait_more()
        found = self._taken(at)
        del self._bytes[: len(mark)]
        return found

    async def begins_with(self, mark: bytes) -> bool:
        while len(self._bytes) < len(mark):
            await self._wait_more()
        return self._bytes.startswith(mark)

    def _taken(self, count: int) -> bytes:
        taken = bytes(self._bytes[:count])
        del self._bytes[:count]
        return taken

    async def _wait_more(self) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is None:
            raise invalid("The multipart body ends before its last boundary.")
        self._bytes += chunk


def _part_of(head: bytes) -> Part:
    try:
        # not every database can keep a NUL, and no name has one
        lines = _without_nul(head.decode()).split("\r\n")
    except UnicodeDecodeError:
        raise invalid("The head of a part is not valid UTF-8.") from None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            found = _parameters("content-disposition", value.strip())
            field = found.get_param("name", header="content-disposition")
            if found.get_content_disposition() == "form-data" and isinstance(field, str):
                return Part(field, found.get_filename())
    raise invalid('A part of the multipart body has no header Content-Disposition: form-data; name="...".')


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise invalid("The head of a part has a NUL character. Remove it.")
    return text


def _parameters(header: str, value: str) -> email.message.Message:
    """The standard library's reader of `a; b=c`."""
    if value.count(";") > _MAX_PARAMETERS:
        raise invalid(f"A header {header} has more than {_MAX_PARAMETERS} semicolons.")
    message = email.message.Message()
    message[header] = value
    return message

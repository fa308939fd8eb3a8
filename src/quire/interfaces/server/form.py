"""A form with one file, held in memory: the fields by name, and the file's bytes. So many are held at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from fastapi import Request

from quire.interfaces.server.request_body import BodyChunks, check_encoding, in_bytes
from quire.interfaces.server.wire.errors import CLOSE, RETRY_SOON, ApiError, idle, invalid, unavailable
from quire.interfaces.server.wire.multipart import Part, boundary_of, read_parts

_MOST_FIELD_BYTES = 64 * 1024
_DISCARD_SECONDS = 2.0
# forms that are held while they come, and until nobody needs them
_MOST_AT_ONCE = 6
# Slower ones would keep the places from all others: a byte now and then is never idle.
_SLOWEST_BYTES_A_SECOND = 16 * 1024


@dataclass(slots=True)
class Form:
    """What came. A name may come several times."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    file: bytes | None = None


class Forms:
    """Those of one server."""

    def __init__(self, idle_seconds: float, queue_seconds: float) -> None:
        """`queue_seconds`: the longest wait for a place."""
        self._idle_seconds = idle_seconds
        self._queue_seconds = queue_seconds
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)

    @asynccontextmanager
    async def held(self, request: Request, most_bytes: int) -> AsyncIterator[Form]:
        """It has a place until the block ends. ApiError for what is no such form, or larger."""
        check_encoding(request)
        boundary = boundary_of(request.headers.get("content-type", "").strip())
        body = BodyChunks(request)
        await self._wait_for_place(body)
        try:
            yield await self._read(body, boundary, most_bytes)
        finally:
            self._slots.release()

    async def _wait_for_place(self, body: BodyChunks) -> None:
        try:
            async with asyncio.timeout(self._queue_seconds):
                await self._slots.acquire()
        except TimeoutError:
            await body.discard(_DISCARD_SECONDS)
            raise unavailable(
                f"The form waited for {self._queue_seconds:g} s, as {_MOST_AT_ONCE} others have the places "
                "(max_queue_seconds). Send it again later.",
                {**RETRY_SOON, **CLOSE},
            ) from None

    async def _read(self, body: BodyChunks, boundary: bytes, most_bytes: int) -> Form:
        try:
            return await self._form(body, boundary, most_bytes)
        except ApiError:
            # a client that is still sending misses an answer that comes too early
            await body.discard(_DISCARD_SECONDS)
            raise

    async def _form(self, body: BodyChunks, boundary: bytes, most_bytes: int) -> Form:
        form = Form()
        content = bytearray()
        part = Part("", None)
        async with aclosing(self._chunks(body)) as chunks, aclosing(read_parts(chunks, boundary)) as parts:
            async for item in parts:
                if isinstance(item, Part):
                    _end(form, part, content)
                    part = item
                    content = bytearray()
                    if part.name == "file" and form.file is not None:
                        raise invalid("file: given twice.", "file")
                    continue
                content += item
                name = part.name[:64]
                if part.name == "file" and len(content) > most_bytes:
                    text = f"file: larger than {in_bytes(most_bytes)}, the most that is taken. Make it smaller."
                    raise ApiError(413, text, param="file", headers=CLOSE)
                if part.name != "file" and len(content) > _MOST_FIELD_BYTES:
                    raise invalid(f"{name}: longer than {_MOST_FIELD_BYTES} bytes.", name)
        _end(form, part, content)
        await body.discard(_DISCARD_SECONDS)
        return form

    async def _chunks(self, body: BodyChunks) -> AsyncGenerator[bytes, None]:
        clock = asyncio.get_running_loop().time
        end = clock() + self._idle_seconds
        while not body.is_over:
            seconds = min(self._idle_seconds, end - clock())
            try:
                async with asyncio.timeout(seconds):
                    chunk = await body.take()
            except TimeoutError:
                raise idle(
                    f"Nothing of the form came for {self._idle_seconds:g} seconds (first_byte_seconds), or it came "
                    f"with less than {_SLOWEST_BYTES_A_SECOND >> 10} KiB a second."
                ) from None
            end += len(chunk) / _SLOWEST_BYTES_A_SECOND
            yield chunk


def _end(form: Form, part: Part, content: bytearray) -> None:
    if part.name == "file":
        form.file = bytes(content)
    elif part.name:
        name = part.name[:64]
        try:
            form.fields.setdefault(name, []).append(content.decode())
        except UnicodeDecodeError:
            raise invalid(f"{name}: is not valid UTF-8.", name) from None

"""An upload on its way to the disk: the fields of the form, and the file's bytes in blocks. Holds a megabyte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request

from quire.interfaces.engine_calls import outlast
from quire.interfaces.gateway.files.disk import FileFolder, NewFile
from quire.interfaces.server.request_body import BodyChunks, check_encoding
from quire.interfaces.server.wire.errors import CLOSE, ApiError, idle, invalid
from quire.interfaces.server.wire.multipart import Part, boundary_of, read_parts

# bytes go to the disk in blocks of this size, each in a thread
_BLOCK_BYTES = 2**20
_MAX_FIELD_BYTES = 1024
_MAX_FILENAME = 255
# The form around the file.
_MAX_FRAME_BYTES = 64 * 1024
IDLE_SECONDS = 60.0
# for what is still on its way when the answer is known
_DISCARD_SECONDS = 2.0


@dataclass(slots=True)
class Upload:
    """What came: the form's other fields, and the file, which is whole and not yet kept."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    file: NewFile | None = None

    def drop(self) -> None:
        if self.file is not None:
            self.file.drop()


async def receive_upload(
    request: Request, folder: FileFolder, max_bytes: int, check_room: Callable[[int], None]
) -> Upload:
    """Reads the whole body; `check_room` is told the size before each block is written and may refuse it. Nothing is
    left on the disk by one that raises."""
    check_encoding(request)
    boundary = boundary_of(request.headers.get("content-type", "").strip())
    body = BodyChunks(request)
    upload = Upload()
    try:
        _check_announced(request, max_bytes)
        async with aclosing(_chunks_of(body)) as chunks, aclosing(read_parts(chunks, boundary)) as parts:
            await _read(parts, upload, _Limits(folder, max_bytes, check_room))
        await body.discard(_DISCARD_SECONDS)
        return upload
    except BaseException as error:
        # cancelled or not, what was written goes; a removal is quick
        upload.drop()
        if isinstance(error, ApiError):
            await body.discard(_DISCARD_SECONDS)
        raise


@dataclass(frozen=True, slots=True)
class _Limits:
    folder: FileFolder
    max_bytes: int
    check_room: Callable[[int], None]


async def _read(parts: AsyncGenerator[Part | bytes, None], upload: Upload, limits: _Limits) -> None:
    block = bytearray()
    current = ""
    text = b""
    async for item in parts:
        if isinstance(item, Part):
            _end_field(upload, current, text)
            current = item.name[:64]
            text = b""
            _check_new(upload, item)
            if item.filename is not None:
                upload.filename = item.filename[:_MAX_FILENAME]
                upload.file = limits.folder.begin()
        elif current == "file":
            block += item
            if len(block) >= _BLOCK_BYTES:
                await _write(upload, bytes(block), limits)
                block.clear()
        else:
            text += item
            if len(text) > _MAX_FIELD_BYTES:
                raise invalid(f"{current}: longer than {_MAX_FIELD_BYTES} bytes.", current)
    _end_field(upload, current, text)
    if upload.file is None:
        raise invalid("file: this field is required; it holds the file and its name.", "file")
    if block:
        await _write(upload, bytes(block), limits)


def _check_new(upload: Upload, part: Part) -> None:
    if (part.name == "file") != (part.filename is not None):
        raise invalid(f"{part.name[:64]}: the field `file` is the one that holds a file, with a filename.", "file")
    if part.name in upload.fields or (part.name == "file" and upload.file is not None):
        raise invalid(f"{part.name[:64]}: given twice.", part.name[:64])


def _end_field(upload: Upload, name: str, data: bytes) -> None:
    if name in ("", "file"):
        return
    try:
        upload.fields[name] = data.decode()
    except UnicodeDecodeError:
        raise invalid(f"{name}: is not valid UTF-8.", name) from None


async def _write(upload: Upload, block: bytes, limits: _Limits) -> None:
    assert upload.file is not None
    size = upload.file.num_bytes + len(block)
    if size > limits.max_bytes:
        raise too_large(limits.max_bytes)
    limits.check_room(size)
    # to its end, also if the client goes: nobody may close the file while a thread writes it
    await outlast(asyncio.to_thread(upload.file.write, block))


def too_large(max_bytes: int) -> ApiError:
    text = f"file: larger than {max_bytes:,} bytes, which is this server's limit (option max_file_bytes)."
    return ApiError(413, text, param="file", code="file_too_large", headers=CLOSE)


def _check_announced(request: Request, max_bytes: int) -> None:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes + _MAX_FRAME_BYTES:
        raise too_large(max_bytes)


async def _chunks_of(body: BodyChunks) -> AsyncGenerator[bytes, None]:
    while not body.is_over:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                chunk = await body.take()
        except TimeoutError:
            raise idle(f"Nothing of the upload came for {IDLE_SECONDS:g} seconds.") from None
        yield chunk

"""Files of tenants: bytes in the folder and rows in the storage, kept together.

The bytes come first and go last: a crash in between leaves bytes without a row, which a later start removes, and never
a row without bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from fastapi import Request

from quire.interfaces.engine_calls import outlast
from quire.interfaces.gateway.files.answers import FileObject, checked_lifetime
from quire.interfaces.gateway.files.disk import FileFolder, is_file_id, new_file_id
from quire.interfaces.gateway.files.records import FileRecords
from quire.interfaces.gateway.files.upload import Upload, receive_upload
from quire.interfaces.gateway.storage.storage import Storage
from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.interfaces.server.wire.paging import Page

logger = logging.getLogger("quire.server")

PURPOSES = ("batch",)
# by the server alone
BATCH_OUTPUT = "batch_output"
_REFUSED_PURPOSES = {
    "assistants": "there is no Assistants API here",
    "fine-tune": "nothing is trained here",
    "vision": "images are not read from files here",
    "user_data": "no endpoint here reads files but /v1/batches",
    "evals": "there is no evaluation API here",
    BATCH_OUTPUT: "such files are made by batches",
}
_EXPIRES_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")
_MAX_UPLOADS = 8
# What nobody has written to for so long is no upload any more (max_request_seconds is far less).
_LEFT_SECONDS = 3600


class Files:
    """All files of a server."""

    def __init__(self, folder: FileFolder, storage: Storage, *, max_file_bytes: int, max_tenant_bytes: int) -> None:
        self._folder = folder
        self._records = FileRecords(storage)
        self._max_file_bytes = max_file_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._pending: Counter[str] = Counter()
        # by tenant: whoever sends slowly holds up nobody else
        self._uploads: Mapping[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_MAX_UPLOADS))

    async def receive(self, request: Request, tenant: str) -> FileObject:
        """An upload. Nothing is left of one that fails."""
        await self._records.check()
        await self.remove_expired()
        async with self._uploads[tenant]:
            with self._room(tenant, await self._records.num_bytes(tenant)) as check_room:
                upload = await receive_upload(request, self._folder, self._max_file_bytes, check_room)
                try:
                    return await outlast(self._keep(upload, tenant))
                finally:
                    upload.drop()

    async def adopt(self, file_id: str, tenant: str, filename: str, expires_after: int | None) -> FileObject | None:
        """Makes a file of what a batch has written there; None if it wrote nothing. May be done twice."""
        path = self.path_of(file_id)
        try:
            size = (await asyncio.to_thread(path.stat)).st_size
        except FileNotFoundError:
            return None
        now = self._records.now
        file = _object(now, file_id, size, filename, BATCH_OUTPUT, expires_after)
        await self._records.insert(file, tenant, now, quota=None)
        return file

    async def find(self, file_id: str, tenant: str) -> FileObject:
        """Raises 404."""
        file = await self._records.find(file_id, tenant) if is_file_id(file_id) else None
        if file is None:
            raise ApiError(404, f"No such File object: {file_id[:80]}", param="id", code="file_not_found")
        return file

    def path_of(self, file_id: str) -> Path:
        return self._folder.path_of(file_id)

    async def page(self, tenant: str, purpose: str | None, page: Page) -> tuple[list[FileObject], bool]:
        return await self._records.page(tenant, purpose, page)

    async def delete(self, file_id: str, tenant: str) -> None:
        """Raises 404."""
        await self.find(file_id, tenant)
        await self._records.delete(file_id, tenant)
        await asyncio.to_thread(self._folder.remove, file_id)

    async def remove_expired(self) -> None:
        for file_id in await self._records.take_expired():
            await asyncio.to_thread(self._folder.remove, file_id)

    async def sweep(self, in_work: Collection[str]) -> None:
        """Removes bytes that no row and no batch knows of, and that nobody has written to for an hour."""
        known = await self._records.all_ids()
        await asyncio.to_thread(self._folder.sweep, known | set(in_work), self._records.now - _LEFT_SECONDS)

    # ------------------------------------------------------------------------------------------ inside

    async def _keep(self, upload: Upload, tenant: str) -> FileObject:
        assert upload.file is not None
        purpose, seconds = _checked_fields(upload.fields)
        now = self._records.now
        file = _object(now, new_file_id(), upload.file.num_bytes, upload.filename, purpose, seconds)
        await asyncio.to_thread(self._folder.keep, upload.file, file.id)
        try:
            if not await self._records.insert(file, tenant, now, quota=self._max_tenant_bytes):
                raise self._no_room()
        except BaseException:
            self._folder.remove(file.id)
            raise
        return file

    @contextlib.contextmanager
    def _room(self, tenant: str, num_stored: int) -> Iterator[_Room]:
        room = _Room(self, tenant, num_stored)
        try:
            yield room
        finally:
            self._pending[tenant] -= room.num_bytes

    def _no_room(self) -> ApiError:
        text = (
            f"Your files would be larger than {self._max_tenant_bytes:,} bytes together, which is this server's limit "
            "(option max_tenant_file_bytes). Delete files that are no longer needed."
        )
        headers = {"x-should-retry": "false"}
        return ApiError(507, text, type="server_error", code="file_quota_exceeded", headers=headers)


class _Room:
    """What one upload takes of its tenant's room, while it comes."""

    def __init__(self, files: Files, tenant: str, num_stored: int) -> None:
        self._files = files
        self._tenant = tenant
        self._num_stored = num_stored
        self.num_bytes = 0

    def __call__(self, size: int) -> None:
        pending = self._files._pending
        pending[self._tenant] += size - self.num_bytes
        self.num_bytes = size
        if self._num_stored + pending[self._tenant] > self._files._max_tenant_bytes:
            raise self._files._no_room()


def _object(now: float, file_id: str, size: int, filename: str, purpose: str, seconds: int | None) -> FileObject:
    created = int(now)
    expires_at = None if seconds is None else created + seconds
    return FileObject(
        id=file_id, bytes=size, created_at=created, expires_at=expires_at, filename=filename, purpose=purpose
    )


def _checked_fields(fields: Mapping[str, str]) -> tuple[str, int | None]:
    """Purpose, and seconds to live."""
    for name in fields:
        if name not in ("purpose", *_EXPIRES_FIELDS):
            raise invalid(f"Unknown field {name!r}. There are: file, purpose, expires_after.", name)
    purpose = fields.get("purpose")
    if purpose is None:
        raise invalid("purpose: this field is required.", "purpose")
    if purpose not in PURPOSES:
        why = _REFUSED_PURPOSES.get(purpose, "there is no such purpose")
        raise invalid(f"purpose={purpose[:40]!r}: {why}. Use {' or '.join(PURPOSES)}.", "purpose")
    anchor, seconds = (fields.get(name) for name in _EXPIRES_FIELDS)
    if anchor is None and seconds is None:
        return purpose, None
    if seconds is None or not seconds.isascii() or not seconds.isdigit():
        raise invalid("expires_after.seconds: must be a whole number.", "expires_after")
    return purpose, checked_lifetime(anchor, int(seconds[:12]), "expires_after")

"""The batches of a server: made, listed, cancelled, and run in the background. One process runs those of a folder."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

from quire.interfaces.gateway.batches.batch import Batch, BatchRecord, Status, new_batch_id
from quire.interfaces.gateway.batches.job import BatchJob, Workshop
from quire.interfaces.gateway.batches.requests import BatchRequest
from quire.interfaces.gateway.files.disk import new_file_id, storing
from quire.interfaces.gateway.files.files import PURPOSES
from quire.interfaces.gateway.storage.data_folder import marker_of
from quire.interfaces.server.wire.errors import ApiError, unavailable
from quire.interfaces.server.wire.paging import Page

logger = logging.getLogger("quire.server")

_MAX_OPEN = 100
_STOP_SECONDS = 2.0


class Batches:
    """Jobs of open batches, by id; what has ended is in the storage alone."""

    def __init__(self, shop: Workshop, folder: Path, model_name: Callable[[], str]) -> None:
        self._shop = shop
        self._lock = FolderLock(folder)
        self._model_name = model_name
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._has_started = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where lines may go."""
        return self._shop.runner.calls.paths

    async def start(self) -> None:
        """Goes on with what an earlier process has left. May be called again. Raises 503 if another process runs the
        batches of this folder."""
        async with self._starting:
            if self._has_started:
                return
            self._lock.take()
            records, are_all = await self._shop.records.open_ones()
            if are_all:
                in_work = [file_id for one in records for file_id in (one.good_file_id, one.bad_file_id)]
                await self._shop.files.sweep(in_work)
            for record in records:
                try:
                    self._begin(record)
                except Exception:  # one that cannot go on holds up no other
                    logger.exception("batch %s cannot go on", record.batch.id)
            self._has_started = True

    async def stop(self) -> None:
        """Aborts what runs; the next start goes on with it."""
        tasks = list(self._tasks)
        has_open = bool(self._jobs)
        for task in tasks:
            task.cancel()
        if tasks:
            # a disk that hangs is not waited for
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        self._lock.release(is_left=has_open)
        self._has_started = False

    async def create(self, asked: BatchRequest, tenant: str) -> Batch:
        await self._shop.records.check()
        await self.start()
        file = await self._shop.files.find(asked.input_file_id, tenant)
        if file.purpose not in PURPOSES:
            text = f"input_file_id: the purpose of this file is {file.purpose}; it must be batch."
            raise ApiError(400, text, param="input_file_id", code="invalid_file_purpose")
        now = self._shop.records.now
        batch = Batch(
            id=new_batch_id(),
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + asked.window_seconds(),
            metadata=asked.metadata,
            model=self._model_name(),
        )
        record = BatchRecord(
            batch=batch,
            tenant=tenant,
            good_file_id=new_file_id(),
            bad_file_id=new_file_id(),
            output_expires_after=asked.output_lifetime(),
        )
        if not await self._shop.records.insert(record, _MAX_OPEN):
            text = f"{_MAX_OPEN} batches are open, which is the limit. Wait for one to end, or cancel it."
            raise ApiError(429, text, type="requests", code="too_many_batches", headers={"x-should-retry": "false"})
        self._begin(record)
        return batch

    async def find(self, batch_id: str, tenant: str) -> Batch:
        """Raises 404."""
        job = self._jobs.get(batch_id)
        if job is not None and job.record.tenant == tenant:
            return job.current()
        batch = await self._shop.records.find(batch_id[:128], tenant)
        if batch is None:
            raise ApiError(404, f"No such Batch object: {batch_id[:80]}", param="id", code="batch_not_found")
        return batch

    async def page(self, tenant: str, page: Page) -> tuple[list[Batch], bool]:
        found, has_more = await self._shop.records.page(tenant, page)
        return [self._jobs[one.id].current() if one.id in self._jobs else one for one in found], has_more

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        await self.start()
        batch = await self.find(batch_id, tenant)
        job = self._jobs.get(batch_id)
        if batch.has_ended or job is None or batch.status is Status.FINALIZING:
            text = f"The batch is {batch.status.value} and cannot be cancelled."
            raise ApiError(409, text, code="batch_not_cancellable")
        await job.cancel()
        return job.current()

    async def check_unused(self, file_id: str, tenant: str) -> None:
        """Raises 409 for a file that an open batch reads."""
        reader = await self._shop.records.reader_of(file_id[:64], tenant)
        if reader is not None:
            text = f"The batch {reader} reads this file. Wait for its end, or cancel it first."
            raise ApiError(409, text, param="id", code="file_in_use")

    def _begin(self, record: BatchRecord) -> None:
        job = BatchJob(record, self._shop)
        self._jobs[record.batch.id] = job
        task = asyncio.create_task(job.run(), name=record.batch.id)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._end(done, record.batch.id))

    def _end(self, task: asyncio.Task[None], batch_id: str) -> None:
        self._tasks.discard(task)
        self._jobs.pop(batch_id, None)


class FolderLock:
    """Held by the one process that runs the batches of a folder; the system takes it back when that ends."""

    def __init__(self, folder: Path) -> None:
        self._path = marker_of(folder)
        self._descriptor = -1

    def take(self) -> None:
        if self._descriptor >= 0:
            return
        with storing():
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise unavailable(
                "Another server runs the batches of the folder files_folder. Ask that one, or start this one with "
                "a files_folder and a storage_url of its own."
            ) from None
        os.pwrite(descriptor, b"open", 0)
        self._descriptor = descriptor

    def release(self, *, is_left: bool) -> None:
        """is_left: there is something for the next one to go on with."""
        if self._descriptor >= 0:
            if not is_left:
                # not removed: whoever has opened it meanwhile would lock another file than the next one
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

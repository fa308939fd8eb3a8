"""One open batch on its way: checked, run line by line, and its results made into files.

Every step can be done again: a server that ends in the middle goes on where the result files end. A disk or a database
that takes nothing is waited for; the batch's own time goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from quire.interfaces.engine_calls import outlast
from quire.interfaces.gateway.batches.batch import Batch, BatchRecord, BatchUsage, Errors, RequestCounts, Status
from quire.interfaces.gateway.batches.endpoint_calls import Called
from quire.interfaces.gateway.batches.input_lines import InputLine, LineError, check_input, good_lines
from quire.interfaces.gateway.batches.line_run import LineRunner
from quire.interfaces.gateway.batches.records import BatchRecords
from quire.interfaces.gateway.batches.results import ResultLine, Results, answered, not_run
from quire.interfaces.gateway.files.files import Files
from quire.interfaces.server.wire.errors import ApiError

logger = logging.getLogger("quire.server")

_PAUSE_SECONDS = 5.0
_NOT_RUN = {
    Status.EXPIRED: ("batch_expired", "This request was not run before the batch's completion window was over."),
    Status.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was run."),
}


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all jobs of a server share."""

    records: BatchRecords
    files: Files
    runner: LineRunner
    # batches of a tenant that run at a time; its others wait
    turns: Mapping[str, asyncio.Semaphore]
    max_lines: int
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class BatchJob:
    """Owns its batch until it has ended."""

    def __init__(self, record: BatchRecord, shop: Workshop) -> None:
        self.record = record
        self._shop = shop
        self._is_cancelled = asyncio.Event()
        self._is_over = asyncio.Event()
        if self.batch.status is Status.CANCELLING:
            self._is_cancelled.set()
        good, bad = (shop.files.path_of(file_id) for file_id in (record.good_file_id, record.bad_file_id))
        self._results = Results(good, bad)
        self._writing = asyncio.Lock()

    @property
    def batch(self) -> Batch:
        return self.record.batch

    def current(self) -> Batch:
        """With the counts of this moment."""
        tally = self._results.tally
        counts = self.batch.request_counts
        self.batch.request_counts = RequestCounts(counts.total, tally.num_good, tally.num_bad)
        return self.batch

    async def cancel(self) -> None:
        """The client's wish; what runs is aborted. One that is finalizing is too far to be cancelled."""
        if self.batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
            self.batch.enter(Status.CANCELLING, self._shop.records.now)
            self._is_cancelled.set()
            await self._shop.records.update(self.record)

    def expire(self) -> None:
        """The window is over."""
        self._is_over.set()

    async def run(self) -> None:
        """To its end. Cancelled, it is left as it is for the next start."""
        try:
            await asyncio.to_thread(self._results.recover)
            if self.batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
                is_in_time = await self._unless_stopped(self._work())
                if self.batch.status is Status.IN_PROGRESS:
                    await self._enter(Status.FINALIZING if is_in_time else Status.EXPIRED, is_end=not is_in_time)
            if self.batch.status is Status.CANCELLING:
                await self._enter(Status.CANCELLED, is_end=True)
            elif self.batch.status is Status.FINALIZING:
                await self._enter(Status.COMPLETED, is_end=True)
            elif self.batch.status is Status.VALIDATING:
                await self._enter(Status.EXPIRED, is_end=True)
        except Exception as error:
            logger.error("batch %s failed", self.batch.id, exc_info=error)
            text = "The server had an error while it processed the batch. Its log says which."
            self.batch.errors = Errors([LineError("internal_error", None, text)])
            await self._enter(Status.FAILED, is_end=True)
        finally:
            self._results.close()

    # ------------------------------------------------------------------------------------------ the lines

    async def _work(self) -> None:
        batch = self.batch
        async with self._shop.turns[self.record.tenant]:
            file = await self._until_stored(self._opened_input)
            if file is None:
                await self._refuse([LineError("input_file_not_found", None, "The input file was deleted.")])
                return
            with file:
                if batch.status is Status.VALIDATING and not await self._is_valid(file):
                    return
                done = frozenset(self._results.tally.done)
                lines = (line for line in good_lines(file, (batch.endpoint,)) if line.custom_id not in done)
                await self._shop.runner.run(lines, self._on_answer, self.record.tenant)

    async def _opened_input(self) -> BinaryIO | None:
        try:
            return self._shop.files.path_of(self.batch.input_file_id).open("rb")
        except FileNotFoundError:
            return None

    async def _is_valid(self, file: BinaryIO) -> bool:
        found = await asyncio.to_thread(check_input, file, (self.batch.endpoint,), self._shop.max_lines)
        if found.errors:
            await self._refuse(found.errors)
            return False
        if self._is_cancelled.is_set():
            return False
        self.batch.request_counts.total = found.num_lines
        file.seek(0)
        await self._enter(Status.IN_PROGRESS)
        return True

    async def _refuse(self, errors: list[LineError]) -> None:
        self.batch.errors = Errors(errors)
        await self._enter(Status.FAILED, is_end=True)

    async def _on_answer(self, line: InputLine, called: Called) -> None:
        await self._append(answered(line.custom_id, called))

    async def _append(self, line: ResultLine) -> None:
        while True:
            try:
                async with self._writing:
                    # to its end: a line is there wholly or not at all
                    return await outlast(asyncio.to_thread(self._results.append, line))
            except OSError as error:
                logger.error("batch %s waits for the disk: %s", self.batch.id, error)
            await self._shop.sleep(_PAUSE_SECONDS)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Does the work; False if the time was over before. A client's cancellation ends it as well."""
        task = asyncio.ensure_future(work)
        ends = [asyncio.ensure_future(event.wait()) for event in (self._is_cancelled, self._is_over)]
        seconds = max(0, self.batch.expires_at - self._shop.records.now)
        timer = asyncio.get_running_loop().call_later(seconds, self.expire)
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            timer.cancel()
            for each in (task, *ends):
                each.cancel()
            await outlast(_all_ended(task, *ends))

    # ------------------------------------------------------------------------------------------ states

    async def _enter(self, status: Status, *, is_end: bool = False) -> None:
        if is_end:
            await self._make_files(status)
        self.batch.enter(status, self._shop.records.now)
        await self._until_stored(lambda: self._shop.records.update(self.record))

    async def _make_files(self, status: Status) -> None:
        """What was written becomes the batch's files; what was not run is said to be."""
        batch = self.current()
        record = self.record
        if batch.in_progress_at is not None and status in _NOT_RUN:
            await self._explain_the_rest(*_NOT_RUN[status])
            batch = self.current()
        await asyncio.to_thread(self._results.close)
        batch.output_file_id = await self._adopted(record.good_file_id, f"{batch.id}_output.jsonl")
        batch.error_file_id = await self._adopted(record.bad_file_id, f"{batch.id}_error.jsonl")
        tally = self._results.tally
        num_in = tally.num_input_tokens
        num_out = tally.num_output_tokens
        batch.usage = BatchUsage(num_in, num_out, num_in + num_out)

    async def _adopted(self, file_id: str, filename: str) -> str | None:
        adopt = partial(self._shop.files.adopt, file_id, self.record.tenant, filename, self.record.output_expires_after)
        file = await self._until_stored(adopt)
        return None if file is None else file_id

    async def _explain_the_rest(self, code: str, message: str) -> None:
        file = await self._until_stored(self._opened_input)
        if file is None:
            return
        with file:
            for line in good_lines(file, (self.batch.endpoint,)):
                if line.custom_id not in self._results.tally.done:
                    await self._append(not_run(line.custom_id, code, message))

    async def _until_stored(self, store: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await store()
            except (ApiError, OSError) as error:
                logger.error("batch %s waits for the storage: %s", self.batch.id, error)
            await self._shop.sleep(_PAUSE_SECONDS)


async def _all_ended(*tasks: asyncio.Future[Any]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)

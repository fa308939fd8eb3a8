"""What a server has beside its engine: the waiting room, the storage, sessions, files, batches, and responses in the
background. Each is made at its first use, so a server that is never asked for one neither opens a database nor makes a
folder."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import tempfile
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import State

from quire.interfaces.gateway.storage.data_folder import marker_of
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.wire.errors import ApiError

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM
    from quire.interfaces.gateway.access.access import Callers
    from quire.interfaces.gateway.batches.service import Batches
    from quire.interfaces.gateway.files.files import Files
    from quire.interfaces.gateway.responses.background import BackgroundResponses
    from quire.interfaces.gateway.responses.stored import StoredResponses
    from quire.interfaces.gateway.sessions.registry import Sessions
    from quire.interfaces.gateway.storage.storage import Storage
    from quire.interfaces.server.openai_responses.answer import ResponseAnswer
    from quire.interfaces.server.serving import Serving

logger = logging.getLogger("quire.server")

_NOT_READY_PAUSE_SECONDS = 0.5
# how often it is looked what others have left, and what is over its time
UPKEEP_SECONDS = 30.0
# of a tenant
_MAX_RUNNING_BATCHES = 4
IN_MEMORY = "sqlite:///:memory:"
_FOR_LATER = (
    "quire.renderer.template_sandbox",
    "quire.interfaces.gateway.files.files",
    "quire.interfaces.gateway.batches.service",
    "quire.interfaces.gateway.responses.stored",
)


def _import_the_rest() -> None:
    """What the start does without. Whoever needed it first would hold the event loop for a quarter of a second."""
    for module in _FOR_LATER:
        importlib.import_module(module)


class Services:
    """Owned by the server's state; ended by `stop`."""

    def __init__(self, parts: dict[str, Any], callers: Callers, options: ServerOptions) -> None:
        """Without `files_folder` no file outlives the application."""
        self.room = callers.room
        self._parts = parts
        self._serving: Serving = parts["serving"]
        self._callers = callers
        self._options = options
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._upkeep: asyncio.Task[None] | None = None
        # why something could not be looked after, as the log has it already
        self._said: dict[str, str] = {}

    @cached_property
    def storage(self) -> Storage:
        """Where things are kept beyond a request."""
        from quire.interfaces.gateway.storage.storage import Storage

        chosen = self._options
        max_age_seconds = chosen.storage_max_days * 86_400
        return Storage(chosen.storage_url, max_bytes=chosen.storage_max_bytes, max_age_seconds=max_age_seconds)

    @cached_property
    def sessions(self) -> Sessions:
        from quire.interfaces.gateway.sessions.registry import Sessions

        return Sessions(
            lambda: self._serving.engine,
            max_sessions=self._options.max_sessions,
            max_tokens=self._options.max_session_tokens,
            idle_seconds=self._options.session_idle_timeout,
        )

    @cached_property
    def files(self) -> Files:
        from quire.interfaces.gateway.files.disk import FileFolder
        from quire.interfaces.gateway.files.files import Files

        return Files(
            FileFolder(self._folder),
            self.storage,
            max_file_bytes=self._options.max_file_bytes,
            max_tenant_bytes=self._options.max_tenant_file_bytes,
        )

    @cached_property
    def batches(self) -> Batches:
        from quire.interfaces.gateway.batches.endpoint_calls import EndpointCalls
        from quire.interfaces.gateway.batches.job import Workshop
        from quire.interfaces.gateway.batches.line_run import LineRunner
        from quire.interfaces.gateway.batches.records import BatchRecords
        from quire.interfaces.gateway.batches.service import Batches

        calls = EndpointCalls(State(self._parts), self._callers.patient)
        runner = LineRunner(calls, asyncio.Semaphore(self._options.max_batch_concurrency), self._wait_ready)
        shop = Workshop(
            records=BatchRecords(self.storage),
            files=self.files,
            runner=runner,
            turns=defaultdict(lambda: asyncio.Semaphore(_MAX_RUNNING_BATCHES)),
            max_lines=self._options.max_batch_lines,
        )
        return Batches(shop, self._folder, lambda: str(self._parts["models"].own.name))

    @cached_property
    def background_responses(self) -> BackgroundResponses:
        from quire.interfaces.gateway.responses.background import BackgroundResponses

        return BackgroundResponses(self._parts["in_flight"], self.storage)

    def serve(self, engine: AsyncLLM) -> None:
        """As many prompts may wait as this engine has room for."""
        self.room.set_capacity(engine.ready.num_blocks * engine.ready.block_size)

    async def responses_of(self, name: str) -> StoredResponses:
        """Of the tenant of this name. Raises 503 where nothing can be stored now."""
        await self.storage.check()
        return self.stored_responses(name)

    def stored_responses(self, name: str) -> StoredResponses:
        # SQLAlchemy is imported by the first who stores
        from quire.interfaces.gateway.responses.stored import StoredResponses

        return StoredResponses(self.storage, name)

    async def make_in_background(self, answer: ResponseAnswer) -> dict[str, Any]:
        return await self.background_responses.start(answer)

    def statistics(self) -> dict[str, float]:
        """Of the storage; empty as long as nothing was stored."""
        return self.storage.statistics() if "storage" in self.__dict__ else {}

    def resume(self) -> None:
        """From now on: goes on with batches that an earlier process, or another one that died, has left, and removes
        files whose time is over. May be called again."""
        if self._upkeep is None or self._upkeep.done():
            self._upkeep = asyncio.create_task(self._keep_up())

    async def look_after(self) -> None:
        """One round of it. Never raises for what one of them met."""
        for name, work in (("batches", self._go_on_with_batches), ("files", self._remove_expired_files)):
            try:
                await work()
            except Exception as error:
                # the storage is away, another process runs the batches, a fault: said once, and tried again
                if self._said.get(name) != str(error):
                    fault = None if isinstance(error, ApiError) else error
                    logger.warning("%s that were left are not looked after yet: %s", name, error, exc_info=fault)
                self._said[name] = str(error)

    async def stop(self) -> None:
        """What runs is aborted. Batches go on with the next start, sessions end, responses have failed."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        if "batches" in self.__dict__:
            await self.batches.stop()
        if "sessions" in self.__dict__:
            await self.sessions.stop()
        if "background_responses" in self.__dict__:
            await self.background_responses.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def close(self) -> None:
        """After the end of all: what was handed in is written first."""
        if "storage" in self.__dict__:
            self.storage.close()

    @property
    def _lasting_folder(self) -> Path | None:
        folder = self._options.files_folder
        return None if folder is None else Path(os.path.expanduser(folder))

    @cached_property
    def _folder(self) -> Path:
        if self._lasting_folder is not None:
            return self._lasting_folder
        self._temporary = tempfile.TemporaryDirectory(prefix="quire-files-")
        return Path(self._temporary.name)

    async def _keep_up(self) -> None:
        await asyncio.to_thread(_import_the_rest)
        while True:
            await self.look_after()
            await asyncio.sleep(UPKEEP_SECONDS)

    async def _go_on_with_batches(self) -> None:
        folder = self._lasting_folder
        if folder is not None and await asyncio.to_thread(has_open_batches, folder):
            await self.batches.start()

    async def _remove_expired_files(self) -> None:
        folder = self._lasting_folder
        has_files = "files" in self.__dict__
        if has_files or (folder is not None and await asyncio.to_thread(has_left_files, folder)):
            await self.files.remove_expired()

    async def _wait_ready(self) -> None:
        while True:
            try:
                return self._serving.check_ready()
            except ApiError:
                await asyncio.sleep(_NOT_READY_PAUSE_SECONDS)


def has_open_batches(folder: Path) -> bool:
    try:
        return marker_of(folder).stat().st_size > 0
    except OSError:
        return False


def has_left_files(folder: Path) -> bool:
    """Whether there is any file that an earlier process has kept."""
    try:
        return any(entry.name.startswith("file-") for entry in os.scandir(folder))
    except OSError:
        return False

"""Other weights for a running engine, out of a program's memory or from a file (docs/training.md)."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import EngineDeadError, EngineError, RequestError
from quire.interfaces.engine_calls import EngineCalls, control, outlast

logger = logging.getLogger(__name__)
# that are read again for an engine that begins anew
_MOST_FILES = 16
# memory that has a name, by which other processes of this machine find it
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class UpdatedWeights:
    """`version` names blocks of the cache from now on; `num_requests` ran and compute their tokens once more."""

    version: str
    num_weights: int
    num_requests: int


class WeightUpdates:
    """Those that came since the start, for engines that take the place of a dead one: they begin with the checkpoint's
    weights, and are brought to where it was from the same files. Memory that weights came from is gone by then."""

    def __init__(self) -> None:
        # of what the engine has; "": the checkpoint's
        self.version = ""
        # with the version that each led to; None: not all came from files, or too many
        self._files: list[tuple[Path, str]] | None = []
        self._lock = asyncio.Lock()

    async def update(self, engine: EngineCalls, weights: Mapping[str, Any] | str | Path) -> UpdatedWeights:
        """`weights`: tensors by the names of the checkpoint, or a safetensors file or folder that every worker sees."""
        # to its end, also for somebody who waits no longer: a file that is being read must not go
        return await outlast(self._updated(engine, weights))

    async def bring_back(self, engine: EngineCalls) -> None:
        """Of an engine that has taken the place of all: what it has afterwards is what it says it has."""
        # of several processes of a server, one may meet an engine that lives
        if not self.version or (await control(engine, "statistics")).get("num_weight_updates"):
            return
        lost = self.version
        fault = await self._applied(engine)
        if fault is None:
            logger.info("the weights are those of version %s again", lost)
            return
        logger.error(
            "the engine has %s again, not the weights of version %s, which it served before it died: %s. "
            "Update them once more.",
            f"those of version {self.version}" if self.version else "the checkpoint's weights",
            lost,
            fault,
        )

    @asynccontextmanager
    async def bringing_replica(self, engine: EngineCalls) -> AsyncIterator[None]:
        """Of one beside others, which must have the same. Raises EngineError where it cannot. It serves at the end of
        the block: until then there is no update, which would reach the others alone."""
        async with self._lock:
            if self.version:
                await self._bring_replica(engine)
            yield

    async def _bring_replica(self, engine: EngineCalls) -> None:
        others = WeightUpdates()
        others.version = self.version
        others._files = self._files
        fault = await others._applied(engine)
        if fault is not None:
            raise EngineError(
                f"the other replicas have weights of version {self.version}, and this one cannot have them: {fault}. "
                "Start the server again, or update the weights from files."
            )

    async def _applied(self, engine: EngineCalls) -> str | None:
        """Why it does not have this version now. What it has is noted, unless it has died again."""
        files = self._files
        lost = self.version
        self.version = ""
        self._files = []
        try:
            return await self._read_again(engine, files)
        except EngineDeadError:
            self.version = lost
            self._files = files
            raise

    async def _read_again(self, engine: EngineCalls, files: list[tuple[Path, str]] | None) -> str | None:
        if files is None:
            return f"not all of them came from files, or more than {_MOST_FILES} came"
        gone = next((path for path, _ in files if not path.exists()), None)
        if gone is not None:
            return f"{gone} is gone"
        for path, version in files:
            try:
                updated = await _from_file(engine, path)
            except RequestError as error:
                return str(error)
            self._note(path, updated.version)
            if updated.version != version:
                return f"{path} has changed since"
        return None

    def _note(self, path: Path | None, version: str) -> None:
        self.version = version
        if path is None or self._files is None or len(self._files) == _MOST_FILES:
            self._files = None
        else:
            self._files.append((path, version))

    async def _updated(self, engine: EngineCalls, weights: Mapping[str, Any] | str | Path) -> UpdatedWeights:
        async with self._lock:
            if not isinstance(weights, Mapping):
                path = Path(weights).absolute()
                updated = await _from_file(engine, path)
                self._note(path, updated.version)
                return updated
            path = await asyncio.to_thread(_written, weights)
            try:
                updated = await _from_file(engine, path)
            finally:
                path.unlink()
            self._note(None, updated.version)
            return updated


async def _from_file(engine: EngineCalls, path: Path) -> UpdatedWeights:
    # of several copies of the engine none begins while another one must refuse
    await control(engine, "check_weights", path=str(path))
    return UpdatedWeights(**await control(engine, "update_weights", path=str(path)))


def _written(weights: Mapping[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    handle, name = tempfile.mkstemp(prefix="quire-weights-", suffix=".safetensors", dir=folder)
    os.close(handle)
    try:
        # copies of their own: a head may be tied to an embedding, and a file has no word for that
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in weights.items()}, name)
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)

"""Other weights for a running engine, out of a program's memory or from a file (docs/training.md)."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.interfaces.engine_calls import EngineCalls, control, outlast

# memory that has a name, by which other processes of this machine find it
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class UpdatedWeights:
    """`version` names blocks of the cache from now on; `num_requests` ran and compute their tokens once more."""

    version: str
    num_weights: int
    num_requests: int


async def update_weights(engine: EngineCalls, weights: Mapping[str, Any] | str | Path) -> UpdatedWeights:
    """`weights`: tensors by the names of the checkpoint, or a safetensors file or folder that every worker sees."""
    # to its end, also for somebody who waits no longer: a file that is being read must not go
    return await outlast(_updated(engine, weights))


async def _updated(engine: EngineCalls, weights: Mapping[str, Any] | str | Path) -> UpdatedWeights:
    if not isinstance(weights, Mapping):
        return await _from_file(engine, Path(weights).absolute())
    path = await asyncio.to_thread(_written, weights)
    try:
        return await _from_file(engine, path)
    finally:
        path.unlink()


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

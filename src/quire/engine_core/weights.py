"""Other weights for the model of a running engine: they come between two steps, and what was computed with the old ones
is never read again. Called by EngineCore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine_core.scheduler.scheduler import Scheduler
from quire.errors import UserError

# (operation of the worker, its arguments) -> result
WorkerControl = Callable[[str, dict[str, Any]], Any]
_DIGEST_SIZE = 16


class Weights:
    """`version` is empty as long as the weights are those of the checkpoint. Then it follows from all files that came
    since, so that engines which took the same ones name their blocks alike, and others never do."""

    def __init__(self, scheduler: Scheduler, control: WorkerControl) -> None:
        self._scheduler = scheduler
        self._control = control
        self.version = b""

    def update(self, path: str) -> dict[str, Any]:
        """From a safetensors file, or a folder of them, that every worker sees. If anything is wrong with it, nothing
        has changed. Requests that run go on: their tokens are computed once more, with the new weights."""
        if any(True for _ in self._scheduler.manager.kept):
            raise UserError(
                "update_weights: prefixes are pinned or sessions kept, whose keys and values belong to the old "
                "weights. Unpin the prefixes and close the sessions first."
            )
        fault = self._control("check_weights", {"path": path})
        if fault is not None:
            raise UserError(f"update_weights: {fault} The weights are as they were.")
        version = _digest(self.version, path)
        num_weights = self._control("update_weights", {"path": path})
        self.version = version
        num_requests = self._scheduler.forget_computed(version)
        return {"version": version.hex(), "num_weights": num_weights, "num_requests": num_requests}


def _digest(before: bytes, path: str) -> bytes:
    digest = hashlib.blake2b(before, digest_size=_DIGEST_SIZE)
    whole = Path(path)
    for file in sorted(whole.glob("*.safetensors")) if whole.is_dir() else [whole]:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.digest()

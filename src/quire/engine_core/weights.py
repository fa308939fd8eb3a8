"""Other weights for the model of a running engine: they come between two steps, and what was computed with the old ones
is never read again. Called by EngineCore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from quire.engine_core.scheduler.scheduler import Scheduler
from quire.errors import EngineDeadError, UserError

# (operation of the worker, its arguments) -> result
WorkerControl = Callable[[str, dict[str, Any]], Any]
_DIGEST_SIZE = 16


class Weights:
    """`version` is empty as long as the weights are those of the checkpoint. Then it follows from all files that came
    since, so that engines which took the same ones name their blocks alike, and others never do."""

    def __init__(self, scheduler: Scheduler, control: WorkerControl) -> None:
        self._scheduler = scheduler
        self._kept = scheduler.manager.kept
        self._control = control
        self.version = b""
        self._num_updates = 0

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {"check_weights": self.check, "update_weights": self.update}

    def check(self, path: str) -> bool:
        """A safetensors file, or a folder of them, that every worker sees. Raises for the first thing that is wrong
        with it, or with the time. A file that was not touched since is not read twice."""
        if any(True for _ in self._kept):
            raise UserError(
                "update_weights: prefixes are pinned or sessions kept, whose keys and values belong to the old "
                "weights. Unpin the prefixes and close the sessions first."
            )
        fault = self._control("check_weights", {"path": path})
        if fault is not None:
            raise UserError(f"update_weights: {fault} The weights are as they were.")
        return True

    def update(self, path: str) -> dict[str, Any]:
        """From such a file. If anything is wrong with it, nothing has changed. Requests that run go on: their tokens
        are computed once more, with the new weights."""
        self.check(path)
        content = self._control("digest_weights", {"path": path})
        try:
            num_weights = self._control("update_weights", {"path": path})
        except Exception as error:
            # some may be new and others not: nothing that this engine says could be trusted
            raise EngineDeadError(
                f"update_weights: {error} The engine may have weights of two kinds, and ends."
            ) from error
        self.version = hashlib.blake2b(self.version + bytes.fromhex(content), digest_size=_DIGEST_SIZE).digest()
        self._num_updates += 1
        num_requests = self._scheduler.forget_computed(self.version)
        return {"version": self.version.hex(), "num_weights": num_weights, "num_requests": num_requests}

    def statistics(self) -> dict[str, float]:
        return {"num_weight_updates": self._num_updates}

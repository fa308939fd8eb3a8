"""Memory of the KV cache that nobody uses goes back to the system: chunks of the pool whose blocks have long been free.

On a CPU the cache is reserved addresses, and pages come with their first use. A chunk is so many blocks that whole
pages of each tensor are its own. One that was free at every look for a while is given back, one at a time and between
steps; its pages come again when they are written. A free block holds nothing that anybody may read, and what is given
back here comes before the next step: so it is as if that step had overwritten it. Nothing of this changes a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.engine_core.executor.executor import GIVE_BACK, RESIDENT_MEMORY
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.messages import LayerSpec

_QUIET_SECONDS = 30.0
_LOOK_SECONDS = 5.0
# between two chunks: steps go on meanwhile
_PAUSE_SECONDS = 0.05
# of each tensor; a part of a huge page cannot be given back at once
_CHUNK_BYTES = 2 << 20


class NoIdleMemory:
    """A cache that stays as it is: that of a device, or of nobody."""

    report: tuple[str, ...] = ()

    def tend(self, now: float) -> float | None:
        return None

    def statistics(self) -> dict[str, float]:
        return {}


class IdleMemory:
    """Which chunks have been free for how long."""

    def __init__(self, pool: BlockPool, control: Callable[[str, dict[str, Any]], Any], num_chunk_blocks: int) -> None:
        self._pool = pool
        self._control = control
        self._bounds = np.append(np.arange(0, pool.num_blocks, num_chunk_blocks), pool.num_blocks)
        # since when each was free at every look
        self._free_since = np.full(len(self._bounds) - 1, np.inf)
        self._due: list[int] = []
        self._next_call = -np.inf
        # of the pool, when all that is free had been given back, or never used
        self._settled = self._state
        self._num_given_back = 0
        self._most_bytes = 0
        # for the start-up log
        self.report: tuple[str, ...] = ()

    def foresee(self, step_bytes: int) -> None:
        """Called when the engine stands: what it will have in memory when its cache is full. `step_bytes`: what steps
        and records of them will take."""
        now = self._control(RESIDENT_MEMORY, {})
        if not now:
            return
        program = now["resident_bytes"] - now["kv_cache_resident_bytes"]
        self._most_bytes = program + now["kv_cache_bytes"] + step_bytes
        self.report = (
            f"memory: at most {_size(self._most_bytes)}: {_size(program)} for weights and program, "
            f"{_size(now['kv_cache_bytes'])} for the KV cache when all of it is used, {_size(step_bytes)} for steps; "
            f"and what of swap space is used",
        )

    @property
    def _state(self) -> tuple[int, int]:
        """As long as this is the same, the same blocks are free and nobody has used them."""
        return self._pool.num_taken, self._pool.num_free

    def tend(self, now: float) -> float | None:
        """Called between steps: a look, or a chunk that is given back. Seconds until the next call; None: there is
        nothing to do before somebody uses a block."""
        if not self._due and self._state == self._settled:
            return None
        if now < self._next_call:
            return self._next_call - now
        if not self._due:
            self._look(now)
        wait = _LOOK_SECONDS
        if self._due:
            self._give_back(self._due.pop())
            wait = _PAUSE_SECONDS
        self._next_call = now + wait
        return wait

    def statistics(self) -> dict[str, float]:
        return {
            "num_blocks_given_back_total": self._num_given_back,
            "most_resident_bytes": self._most_bytes,
            **self._control(RESIDENT_MEMORY, {}),
        }

    def _look(self, now: float) -> None:
        is_free = self._pool.free_chunks(self._bounds[:-1])
        self._free_since = np.where(is_free, np.minimum(self._free_since, now), np.inf)
        is_quiet = now - self._free_since >= _QUIET_SECONDS
        self._due = np.flatnonzero(is_quiet)[::-1].tolist()
        # it may be used between two looks: after another while it is given back again, which costs little
        self._free_since[is_quiet] = now
        if (is_quiet == is_free).all():
            self._settled = self._state

    def _give_back(self, chunk: int) -> None:
        first, end = self._bounds[chunk : chunk + 2].tolist()
        if self._pool.is_free(first, end):
            self._control(GIVE_BACK, {"first": first, "end": end})
            self._num_given_back += end - first


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def idle_memory(
    pool: BlockPool, layers: Sequence[LayerSpec], slots_per_block: int, control: Callable[[str, dict[str, Any]], Any]
) -> IdleMemory:
    """For the cache of these layers on a CPU."""
    of_tensors = [layer.state_bytes or layer.bytes_per_token * slots_per_block for layer in layers]
    return IdleMemory(pool, control, -(-_CHUNK_BYTES // max(1, min(of_tensors, default=_CHUNK_BYTES))))

"""KV kept in the memory of this process, for other engines in it: `kv_connector={"name": "memory"}`."""

from __future__ import annotations

from quire.kv_connectors.connector import CacheLayout, SchedulerHalf, WorkerHalf
from quire.kv_connectors.memory.store import open_store


def scheduler_half(layout: CacheLayout, *, store: str = "default", max_bytes: int | str | None = None) -> SchedulerHalf:
    from quire.kv_connectors.memory.scheduler import MemoryScheduler

    return MemoryScheduler(layout, open_store(store, max_bytes))


def worker_half(*, store: str = "default", max_bytes: int | str | None = None) -> WorkerHalf:
    from quire.kv_connectors.memory.worker import MemoryWorker

    return MemoryWorker(open_store(store, max_bytes))

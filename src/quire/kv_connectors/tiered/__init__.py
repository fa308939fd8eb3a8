"""KV kept in host memory and in stores behind it, block by block, under names that say what a block holds:
`kv_connector={"name": "tiered"}`, which the option `kv_store` chooses.

    prefix cache -> host memory -> the first store -> the next one          a block that is full goes all the way down
                 <- host memory <- the first store that has it              a prompt finds it as far up as it lies

    scheduler.py   names, questions, answers        tiers.py     who reads and writes, in threads of their own
    worker.py      blocks of the cache to bytes     host.py      the bytes in memory, bounded
    stage.py       ... of a stage of a pipeline     guard.py     one store: checksums, breaker, what it costs
                                                    stores/      files, Redis and Valkey, S3, ...: five calls each
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_connectors.connector import CacheLayout, NamedBlocks, StageSharers, WorkerHalf
from quire.kv_connectors.tiered.settings import TierSettings
from quire.kv_connectors.tiered.tiers import open_tiers


def scheduler_half(
    layout: CacheLayout,
    *,
    stores: Sequence[str] = (),
    host_bytes: int = 2**30,
    max_wait: float = 2.0,
    rule: str = "cost",
) -> NamedBlocks:
    from quire.kv_connectors.tiered.scheduler import TieredScheduler

    return TieredScheduler(layout, open_tiers(TierSettings.of(stores, host_bytes, max_wait, rule)))


def worker_half(
    *,
    stores: Sequence[str] = (),
    host_bytes: int = 2**30,
    max_wait: float = 2.0,
    rule: str = "cost",
    sharers: StageSharers | None = None,
) -> WorkerHalf:
    from quire.kv_connectors.tiered.stage import TieredStage
    from quire.kv_connectors.tiered.worker import TieredWorker

    settings = TierSettings.of(stores, host_bytes, max_wait, rule)
    if sharers is None:
        return TieredWorker(open_tiers(settings))
    stages = sharers.stages
    tiers = open_tiers(settings) if stages.is_first and sharers.number == 0 else None
    return TieredWorker(tiers, sharers) if stages.is_first and stages.is_last else TieredStage(tiers, sharers)

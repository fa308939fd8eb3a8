"""A worker with a target and something that drafts for it, driven by hand; what became of drafts is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.worker_driver import WorkerDriver

from quire.config import SpeculationConfig
from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.messages import StepOutput
from quire.testing.model_harness import worker_config
from quire.worker.worker import Worker

NUM_DRAFTS = 3
NUM_BLOCKS = 400


class CountingDriver(WorkerDriver):
    """Counts what became of drafts."""

    num_verified = 0
    num_accepted = 0
    # for tests: the draft has the target's weights
    is_twin = False

    def step(self, grants: dict[int, int] | None = None, *, num_drafts: int = 0) -> StepOutput:
        output = super().step(grants, num_drafts=num_drafts)
        self.num_verified += int(output.speculated[3].sum())
        self.num_accepted += int(output.speculated[4].sum())
        return output

    @property
    def acceptance(self) -> float:
        assert self.num_verified > 0, "nothing was verified"
        return self.num_accepted / self.num_verified


def started(path: Path, method: str | None = None, draft: Path | None = None, **options: Any) -> CountingDriver:
    """A worker with its cache, and a driver for it. Without a method nothing is proposed."""
    speculation = None
    if method is not None:
        speculation = SpeculationConfig(method=method, num_speculative_tokens=NUM_DRAFTS, model_path=str(draft))
    worker = Worker(worker_config(path, speculation=speculation, **options))
    worker.load()
    groups, _ = make_groups(worker.measure_capacity().layers)
    worker.initialize_cache([list(group.layer_names) for group in groups], NUM_BLOCKS, 100)
    return CountingDriver(
        worker,
        block_size=4,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=100,
        num_groups=len(groups),
        lookahead=0 if method is None else NUM_DRAFTS,
        seed=1,
    )

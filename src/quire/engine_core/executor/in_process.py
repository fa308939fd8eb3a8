"""One worker in this process. A step is done when `execute` returns."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from quire.config import WorkerConfig
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity


class InProcessExecutor:
    """The simplest executor, and the default on one device."""

    def __init__(self, config: WorkerConfig) -> None:
        # imported here: the core itself knows no torch
        from quire.worker.worker import Worker

        self._worker = Worker(config)
        self._worker.load()

    def measure_capacity(self) -> WorkerCapacity:
        return self._worker.measure_capacity()

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        self._worker.initialize_cache(groups, num_blocks, num_host_blocks)

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        future.set_result(self._worker.execute(output))
        return future

    def control(self, name: str, args: dict[str, Any]) -> Any:
        return self._worker.control(name, args)

    def shutdown(self) -> None:
        self._worker.shutdown()

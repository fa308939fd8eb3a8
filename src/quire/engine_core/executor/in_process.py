"""One worker in this process, in a thread of its own if steps are to run while the next one is decided."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from quire.config import WorkerConfig
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity


class InProcessExecutor:
    """The simplest executor, and the default on one device.

    Asynchronous: one thread runs everything that touches the worker, in the order in which it was asked, so a step that
    waits in its queue begins the moment the last one ends. Otherwise a step is done when `execute` returns.
    """

    def __init__(self, config: WorkerConfig, *, is_async: bool = False) -> None:
        # imported here: the core itself knows no torch
        from quire.worker.worker import Worker

        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-worker") if is_async else None
        self._worker = self._run(Worker, config)
        self._run(self._worker.load)

    def measure_capacity(self) -> WorkerCapacity:
        measured: WorkerCapacity = self._run(self._worker.measure_capacity)
        return measured

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        self._run(self._worker.initialize_cache, groups, num_blocks, num_host_blocks)

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        if self._thread is not None:
            return self._thread.submit(self._worker.execute, output)
        future: Future[StepOutput] = Future()
        future.set_result(self._worker.execute(output))
        return future

    def control(self, name: str, args: dict[str, Any]) -> Any:
        return self._run(self._worker.control, name, args)

    def shutdown(self) -> None:
        self._run(self._worker.shutdown)
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self._thread is None else self._thread.submit(function, *args).result()

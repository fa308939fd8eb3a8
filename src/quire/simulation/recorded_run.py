"""A run with real workers on this machine, written down as a log has it (observability/run_records.py), in memory.

A simulation that is given the same arrivals and times takes the same decisions (tests/simulation/test_recorded_run.py);
measured steps are also what a table of costs is fitted to (costs/table.py). Time passes in steps alone: where nothing
runs, the clock goes to the next arrival.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config import BurstTimes, EngineConfig
from quire.engine_core.executor.executor import Executor
from quire.engine_core.executor.modelled import ModelledExecutor, StepWork
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.launch import make_executor
from quire.engine_core.recorded_core import record_core
from quire.messages import EngineOutputs, EngineRequest, SchedulerOutput, StepOutput, WorkerCapacity
from quire.observability.run_records import Answered, Decided, Measured, RunRecord, Told
from quire.simulation.costs.linear import LinearCosts


@dataclass
class RecordedRun:
    """The records, in order, and what the steps took."""

    records: list[RunRecord] = field(default_factory=list)
    # from the beginning of a step to that of the next one
    seconds: list[float] = field(default_factory=list)
    # what each step did, as a simulation counts it
    works: list[StepWork] = field(default_factory=list)
    # when each step was over, and what it brought
    outputs: list[tuple[float, EngineOutputs]] = field(default_factory=list)

    def write(self, record: RunRecord) -> None:
        self.records.append(record)

    @property
    def capacity(self) -> WorkerCapacity:
        return next(record.capacity for record in self.records if isinstance(record, Measured))

    @property
    def control(self) -> dict[str, Any]:
        """Answers to management operations."""
        return {record.question: record.answer for record in self.records if isinstance(record, Told)}

    @property
    def decisions(self) -> list[Decided]:
        return [record for record in self.records if isinstance(record, Decided)]

    @property
    def answers(self) -> list[StepOutput]:
        return [record.answer for record in self.records if isinstance(record, Answered)]


def record(
    config: EngineConfig,
    arrivals: Iterable[tuple[float, EngineRequest]],
    inner: Executor | None = None,
    *,
    make_manager: Callable[..., KVCacheManager] = KVCacheManager,
    timer: Callable[[], float] = time.perf_counter,
) -> RecordedRun:
    """Runs these requests one step after the other, each from its second on, until all have ended. `timer`:
    process_time leaves out what else the machine does. A step brings one token of a row, whose price is asked for."""
    config = replace(config, worker=replace(config.worker, burst_times=BurstTimes()))
    run = RecordedRun()
    core = record_core(config, inner or make_executor(config.worker), run, timer, make_manager=make_manager)
    decided: list[SchedulerOutput] = []
    core.watch_steps(lambda decision, work: decided.append(decision))
    # keeps the numbers of rows beside the worker
    counter = ModelledExecutor(run.capacity, LinearCosts(), answers=lambda step: _last_answer(run))
    counter.on_step = lambda decision, work, done_at: run.works.append(work)
    pending = deque(arrivals)
    now = 0.0
    with _uncollected():
        while pending or core.has_work:
            if not core.has_work:
                now = max(now, pending[0][0])
            while pending and pending[0][0] <= now:
                core.add(pending.popleft()[1])
            began = timer()
            outputs = core.step()
            if decided:
                run.seconds.append(timer() - began)
                now += run.seconds[-1]
                counter.execute(decided.pop())
            run.outputs.append((now, outputs))
    core.shutdown()
    return run


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is written down stays to the end, and steps make few cycles: a pass of the garbage collector through all of
    it takes 0.1 to 0.4 s, and would be told as the time of the step in which it happens to come."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _last_answer(run: RecordedRun) -> StepOutput:
    """Of the step that has just been settled."""
    return next(record.answer for record in reversed(run.records) if isinstance(record, Answered))

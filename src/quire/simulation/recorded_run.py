"""A run with real workers on this machine, written down: what arrived, what steps took, what workers said.

A simulation that is given the same arrivals and times takes the same decisions (tests/simulation/test_recorded_run.py);
measured steps are also what a table of costs is fitted to (costs/table.py). Time passes in steps alone: where nothing
runs, the clock goes to the next arrival.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.config import EngineConfig
from quire.engine_core.executor.executor import Executor, PendingStep
from quire.engine_core.executor.in_process import InProcessExecutor
from quire.engine_core.executor.modelled import ModelledExecutor, StepWork, VirtualClock
from quire.engine_core.launch import build_engine_core
from quire.messages import EngineOutputs, EngineRequest, SchedulerOutput, StepOutput, WorkerCapacity
from quire.simulation.costs.linear import LinearCosts


@dataclass
class RecordedRun:
    """What was measured before the first step, and all steps in order."""

    capacity: WorkerCapacity
    # answers to management operations at the start
    control: dict[str, Any]
    decisions: list[SchedulerOutput] = field(default_factory=list)
    answers: list[StepOutput] = field(default_factory=list)
    # from the beginning of a step to that of the next one
    seconds: list[float] = field(default_factory=list)
    # what each step did, as a simulation counts it
    works: list[StepWork] = field(default_factory=list)
    # when each step was over, and what it brought
    outputs: list[tuple[float, EngineOutputs]] = field(default_factory=list)


class RecordingExecutor:
    """Passes everything on."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.run = RecordedRun(WorkerCapacity(layers=[], available_bytes=0, explanation=""), {})
        # keeps the numbers of rows beside the worker
        self._counter: ModelledExecutor | None = None

    def measure_capacity(self) -> WorkerCapacity:
        run = self.run
        run.capacity = self._inner.measure_capacity()
        answers = run.answers
        self._counter = ModelledExecutor(run.capacity, LinearCosts(), answers=lambda step: answers[-1])
        self._counter.on_step = lambda decided, work, done_at: run.works.append(work)
        return run.capacity

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        self._inner.initialize_cache(groups, num_blocks, num_host_blocks)

    def execute(self, output: SchedulerOutput) -> PendingStep:
        self.run.decisions.append(output)
        pending = self._inner.execute(output)
        self.run.answers.append(pending.result())
        assert self._counter is not None
        self._counter.execute(output)
        return pending

    def run_ahead(self) -> None:
        raise AssertionError("a recorded run makes one step after the other")

    def control(self, name: str, args: dict[str, Any]) -> Any:
        self.run.control[name] = self._inner.control(name, args)
        return self.run.control[name]

    def loss_descriptors(self) -> tuple[int, ...]:
        return self._inner.loss_descriptors()

    def check_workers(self) -> None:
        self._inner.check_workers()

    def shutdown(self) -> None:
        self._inner.shutdown()


def record(
    config: EngineConfig, arrivals: Iterable[tuple[float, EngineRequest]], inner: Executor | None = None
) -> RecordedRun:
    """Runs these requests, each from its second on, until all have ended."""
    executor = RecordingExecutor(inner or InProcessExecutor(config.worker))
    core = build_engine_core(config, executor)
    run = executor.run
    pending = deque(arrivals)
    now = 0.0
    while pending or core.has_work:
        if not core.has_work:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            core.add(pending.popleft()[1])
        num_steps = len(run.decisions)
        began = time.perf_counter()
        outputs = core.step()
        if len(run.decisions) > num_steps:
            run.seconds.append(time.perf_counter() - began)
            now += run.seconds[-1]
        run.outputs.append((now, outputs))
    core.shutdown()
    return run


class RecordedCosts:
    """What the steps of a run took, one after the other."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds: Iterator[float] = iter(seconds)

    def seconds(self, work: StepWork) -> float:
        return next(self._seconds)


def modelled_worker(
    run: RecordedRun, config: EngineConfig, clock: VirtualClock, *, with_answers: bool
) -> ModelledExecutor:
    """A worker that takes as long as the recorded one. `with_answers`: it also says what that one said, where decisions
    hang on it (stop tokens, beams, drafts, siblings that may sample the same)."""
    answers = {answer.step: answer for answer in run.answers}
    return ModelledExecutor(
        run.capacity,
        RecordedCosts(run.seconds),
        clock=clock,
        vocab_size=config.facts.vocab_size,
        control=run.control,
        answers=answers.__getitem__ if with_answers else None,
    )

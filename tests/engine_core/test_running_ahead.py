"""Whether steps are decided ahead of their results (4.6.1): what was asked, or else what a step takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine_core.executor.in_process import InProcessExecutor
from quire.engine_core.launch import _runs_ahead
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity


@pytest.mark.parametrize(
    ("asked", "seconds", "is_ahead"),
    [(None, 0.001, False), (None, 0.03, True), (True, 0.001, True), (False, 0.03, False)],
)
def test_by_default_the_length_of_a_step_decides(asked: bool | None, seconds: float, is_ahead: bool) -> None:
    measured = WorkerCapacity(layers=[], available_bytes=0, explanation="", seconds_per_step=seconds)
    config: Any = SimpleNamespace(async_scheduling=asked)
    decided, reason = _runs_ahead(config, measured)
    assert decided is is_ahead
    assert f"async_scheduling={is_ahead}" in reason
    assert f"{seconds * 1e3:.1f} ms" in reason


class SlowWorker:
    """Does a step when it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.steps: list[int] = []

    def execute(self, output: SchedulerOutput) -> StepOutput:
        assert self.may_go_on.wait(10)
        self.steps.append(output.step)
        if output.step == 3:
            raise ValueError("a step that fails")
        return StepOutput(step=output.step)

    def shutdown(self) -> None:
        self.steps.append(-1)


def test_steps_wait_for_each_other_and_nobody_waits_for_them() -> None:
    executor = InProcessExecutor.__new__(InProcessExecutor)
    worker = SlowWorker()
    executor.worker = worker  # type: ignore[assignment]
    executor.run_ahead()
    futures = [executor.execute(SchedulerOutput(step=step)) for step in (1, 2, 3)]
    assert worker.steps == []
    worker.may_go_on.set()
    assert [future.result().step for future in futures[:2]] == [1, 2]
    with pytest.raises(ValueError, match="fails"):
        futures[2].result()
    executor.shutdown()
    assert worker.steps == [1, 2, 3, -1]

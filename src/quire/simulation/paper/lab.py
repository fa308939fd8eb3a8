"""Runs what figures ask for: each run once, however many figures look at it, on so many processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from quire.engine_core.executor.modelled import StepWork
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.experiment import Case, Knee, Measured, capacity, find_knee, measure
from quire.simulation.paper.systems import PAGED, deploy_system

# A system keeps up while an answer's token takes no longer than so many steps of the engine with one sequence.
_STEPS_A_TOKEN = 5.0
_FEWEST = 4


def scaled(num_requests: int, scale: float) -> int:
    """So many in a run of that scale: at the least as many as have a middle half."""
    return max(_FEWEST, round(num_requests * scale))


class Task(Protocol):
    """Something to run; equal ones have equal results."""

    def run(self, assumed: Assumptions, scale: float) -> Any: ...


@dataclass(frozen=True)
class RunAt:
    """One rate, for so many requests; to their ends where latency counts."""

    case: Case
    rate: float
    num_requests: int
    drains: bool = False

    def run(self, assumed: Assumptions, scale: float) -> Measured:
        return measure(self.case, self.rate, scaled(self.num_requests, scale), assumed, drains=self.drains)


@dataclass(frozen=True)
class KneeOf:
    """The rate up to which it keeps up. The search begins at `start`, which decides how long it takes and nothing
    else."""

    case: Case
    start: float
    num_requests: int

    def run(self, assumed: Assumptions, scale: float) -> Knee:
        bound = latency_bound(self.case, assumed)

        def run(rate: float) -> Measured:
            return measure(
                self.case,
                rate,
                scaled(self.num_requests, scale),
                assumed,
                give_up_beyond=4 * bound,
                counts_memory=False,
                drains=True,
            )

        return find_knee(run, bound, self.start)


@dataclass(frozen=True)
class CapacityOf:
    """Requests a second, when so many wait from the start. It takes one run, where a knee takes ten."""

    case: Case
    num_requests: int

    def run(self, assumed: Assumptions, scale: float) -> float:
        return capacity(self.case, scaled(self.num_requests, scale), assumed)


@dataclass(frozen=True)
class Under:
    """A task with other values of some assumptions."""

    task: Task
    changes: tuple[tuple[str, float], ...]

    def run(self, assumed: Assumptions, scale: float) -> Any:
        return self.task.run(assumed.under(dict(self.changes)), scale)


def latency_bound(case: Case, assumed: Assumptions) -> float:
    """Seconds a token, the same for all systems of a panel."""
    costs = deploy_system(PAGED, case.setup, assumed).costs
    return _STEPS_A_TOKEN * float(costs.seconds(StepWork(num_rows=1, num_tokens=1, num_sampled=1)))


class Lab:
    """`scale`: of the number of requests in each run."""

    def __init__(
        self,
        assumed: Assumptions,
        *,
        scale: float = 1.0,
        num_processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.assumed = assumed
        self._scale = scale
        self._num_processes = num_processes
        self._progress = progress or (lambda done, total: None)
        self._results: dict[Task, Any] = {}

    def results(self, tasks: Iterable[Task]) -> dict[Task, Any]:
        missing = [task for task in dict.fromkeys(tasks) if task not in self._results]
        if self._num_processes == 1 or len(missing) <= 1:
            for number, task in enumerate(missing):
                self._results[task] = task.run(self.assumed, self._scale)
                self._progress(number + 1, len(missing))
            return self._results
        with ProcessPoolExecutor(min(self._num_processes, len(missing))) as pool:
            futures = {task: pool.submit(task.run, self.assumed, self._scale) for task in missing}
            for number, (task, future) in enumerate(futures.items()):
                self._results[task] = future.result()
                self._progress(number + 1, len(missing))
        return self._results

"""What an executor is: the way from a decision to the workers and back."""

from __future__ import annotations

from typing import Any, Protocol

from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity

# Controls that no decision depends on: a recorded run knows nothing of them.
GIVE_BACK = "give_back"
RESIDENT_MEMORY = "resident_memory"
STEP_TIMES = "step_times"
WATCH_ARRIVALS = "watch_arrivals"
UNRECORDED = frozenset((GIVE_BACK, RESIDENT_MEMORY, STEP_TIMES, WATCH_ARRIVALS))


class PendingStep(Protocol):
    """A step that was handed in."""

    def result(self) -> StepOutput:
        """Waits for it. Raises if the step as a whole failed."""


class Executor(Protocol):
    """Runs steps in the order in which they are given."""

    def measure_capacity(self) -> WorkerCapacity:
        """Which layers keep a cache, the memory left for it and for swap space, and how fast tokens are computed."""

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the cache and the swap space beside it; nothing is allocated for them afterwards."""

    def execute(self, output: SchedulerOutput) -> PendingStep:
        """One step."""

    def run_ahead(self) -> None:
        """From now on `execute` returns at once."""

    def control(self, name: str, args: dict[str, Any]) -> Any:
        """A management operation, passed to every worker."""

    def loss_descriptors(self) -> tuple[int, ...]:
        """Files that become readable when a worker is lost."""

    def check_workers(self) -> None:
        """Raises if one is."""

    def shutdown(self) -> None: ...

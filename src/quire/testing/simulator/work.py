"""Time and work of the simulated executor: what a step takes, and what was done so far."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from quire.messages import StepOutput


class SimulatedClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


@dataclass
class SimulatedWork:
    """What was done so far."""

    num_steps: int = 0
    num_tokens: int = 0
    num_context_tokens: int = 0
    num_forks: int = 0
    num_copied_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    # steps of a row that looked at some of its drafts and left others for later
    num_partial_verifications: int = 0


class SimulatedAnswer(Future[StepOutput]):
    """What a step brings, known at once; whoever waits for it lets the time pass that the step takes."""

    def __init__(self, output: StepOutput, clock: SimulatedClock, done_at: float) -> None:
        super().__init__()
        self._clock, self._done_at = clock, done_at
        self.set_result(output)

    def result(self, timeout: float | None = None) -> StepOutput:
        self._clock.advance(max(0.0, self._done_at - self._clock.now()))
        return super().result(timeout)

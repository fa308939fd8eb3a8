"""How somebody hears of the steps of a core: of times, of the prefix cache, of decisions.

An observer changes nothing that is decided. EngineCore tells it how far a step is, and does not know what it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.messages import SchedulerOutput
from quire.observability.step_times import NoStepTimes


class StepObserver:
    """What there is to hear; an observer overrides what it wants to hear of."""

    # Steps may be taken together, and then nobody hears of each decision, unless an observer needs that.
    needs_decisions = False

    def begins(self) -> None:
        """A step begins."""

    def decided(self, decision: SchedulerOutput, work: int) -> None:
        """What it will compute, before it is executed; `work`: that of all steps under way with it, in
        tokens."""

    def ends(self, phase: str) -> None:
        """A part of it is over (observability/step_times.py names them)."""

    def settled(self) -> None:
        """Its results are known, and requests may have let go of something."""


class StepObservers(StepObserver):
    """Several of them as one. Each event goes to those alone who override it."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self.observers = tuple(observers)
        self.needs_decisions = any(observer.needs_decisions for observer in observers)
        self._begins = [observer.begins for observer in observers if type(observer).begins is not StepObserver.begins]
        self._decided = [
            observer.decided for observer in observers if type(observer).decided is not StepObserver.decided
        ]
        self._ends = [observer.ends for observer in observers if type(observer).ends is not StepObserver.ends]
        self._settled = [
            observer.settled for observer in observers if type(observer).settled is not StepObserver.settled
        ]

    def begins(self) -> None:
        for tell in self._begins:
            tell()

    def decided(self, decision: SchedulerOutput, work: int) -> None:
        for tell in self._decided:
            tell(decision, work)

    def ends(self, phase: str) -> None:
        for tell in self._ends:
            tell(phase)

    def settled(self) -> None:
        for tell in self._settled:
            tell()


class TimedSteps(StepObserver):
    """Adds what each part of a step took, and how large its decision was, to the times of a process."""

    def __init__(self, times: NoStepTimes) -> None:
        self._times = times

    def begins(self) -> None:
        self._times.begin()

    def decided(self, decision: SchedulerOutput, work: int) -> None:
        self._times.sent("decisions", decision.num_column_bytes)

    def ends(self, phase: str) -> None:
        self._times.ends(phase)


class WatchedDecisions(StepObserver):
    """Calls a function with each decision."""

    needs_decisions = True

    def __init__(self, on_step: Callable[[SchedulerOutput, int], None]) -> None:
        self._on_step = on_step

    def decided(self, decision: SchedulerOutput, work: int) -> None:
        self._on_step(decision, work)

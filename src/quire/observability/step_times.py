"""Where the time of steps goes, and how many bytes they send: sums by name, read by whoever asks for statistics.

A phase ends where the next one begins, so that one reading of the clock is enough for both. The clock is handed in; no
time that is kept here ever comes back into a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Of the process that decides. `execute`: the step is handed to the workers; where steps are decided one after the other
# in the workers' own process, they compute it then. `control`: management calls.
CORE_PHASES = ("receive", "control", "schedule", "execute", "wait", "update", "deliver")
# what remains of them is the engine's own price
OVERHEAD_PHASES = ("receive", "schedule", "update", "deliver")
# Of the first worker. `forward`: on a device, until the work is handed over; `sample` then waits for it. On a CPU the
# choice of tokens is in it where rows ask for nothing else.
WORKER_PHASES = ("prepare", "forward", "sample", "draft", "finish")
# What is sent: columns of decisions, the same encoded for other ranks, inputs for a device, messages to clients.
SENT = ("decisions", "ranks", "device", "clients")


class NoStepTimes:
    """Nobody counts."""

    def begin(self) -> None:
        """A phase begins, whatever was before."""

    def ends(self, phase: str) -> None:
        """What has passed since then belongs to this phase, and the next one begins."""

    def sent(self, what: str, num_bytes: int) -> None:
        """So many bytes went somewhere."""

    def statistics(self) -> dict[str, float]:
        return {}


class StepTimes(NoStepTimes):
    """Of one thread."""

    def __init__(self, clock: Callable[[], float], phases: Sequence[str], prefix: str = "") -> None:
        self._clock = clock
        self._prefix = prefix
        self._seconds = dict.fromkeys(phases, 0.0)
        self._num_bytes: dict[str, int] = {}
        self._since = clock()

    def begin(self) -> None:
        self._since = self._clock()

    def ends(self, phase: str) -> None:
        now = self._clock()
        self._seconds[phase] += now - self._since
        self._since = now

    def sent(self, what: str, num_bytes: int) -> None:
        self._num_bytes[what] = self._num_bytes.get(what, 0) + num_bytes

    def statistics(self) -> dict[str, float]:
        times = {f"{self._prefix}step_seconds_{phase}_total": seconds for phase, seconds in self._seconds.items()}
        return {**times, **{f"step_bytes_{what}_total": count for what, count in self._num_bytes.items()}}

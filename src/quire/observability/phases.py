"""Where the time of a start-up went: named spans in order, printed as one table.

Spans may overlap (the server's modules are imported while the engine loads), so the table ends with the time on the
wall, not with a sum.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_REPORTED = re.compile(r"(.+): (\d+\.\d+) s")


@dataclass(frozen=True, slots=True)
class Phase:
    """One span. Seconds since the start of the timer, and how long it took."""

    name: str
    start: float
    seconds: float
    note: str = ""


class PhaseTimer:
    """Collects phases; the clock is handed in."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._origin = clock()
        self.phases: list[Phase] = []

    @property
    def elapsed(self) -> float:
        return self._clock() - self._origin

    @contextmanager
    def measure(self, name: str, note: str = "") -> Iterator[None]:
        """Times the body of a `with` statement."""
        start = self.elapsed
        try:
            yield
        finally:
            self.phases.append(Phase(name, start, self.elapsed - start, note))

    def report(self) -> list[str]:
        """The phases as lines of text, which another process can send; `add_reported` reads them."""
        return [f"{phase.name}: {phase.seconds:.2f} s" for phase in self.phases]

    def add_reported(self, lines: Iterable[str], *, end: float) -> None:
        """Phases of another process, one after the other, the last of which ended at `end` on this clock."""
        found = [(match[1], float(match[2])) for line in lines if (match := _REPORTED.fullmatch(line))]
        start = end - sum(seconds for _, seconds in found)
        for name, seconds in found:
            self.phases.append(Phase(f"  {name}", start, seconds))
            start += seconds

    def table(self) -> str:
        """One line a phase, in the order in which they began."""
        phases = sorted(self.phases, key=lambda phase: phase.start)
        width = max([len(phase.name) for phase in phases] + [len("ready")])
        lines = [f"{'phase':<{width}}  {'from':>8}  {'took':>8}"]
        for phase in phases:
            note = f"  {phase.note}" if phase.note else ""
            lines.append(f"{phase.name:<{width}}  {phase.start:>6.2f} s  {phase.seconds:>6.2f} s{note}")
        lines.append(f"{'ready':<{width}}  {self.elapsed:>6.2f} s")
        return "\n".join(lines)

"""Which of the paper's orderings hold whatever is assumed: at the ends of each range, and at points drawn within all.

The points are a Latin sample: of each range every quarter is taken once, and the same ones whenever it is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.simulation.paper.assumptions import RANGES, Assumptions
from quire.simulation.paper.lab import Task, Under
from quire.simulation.paper.orderings import Ordering, orderings
from quire.simulation.paper.report import number_in_words

_NUM_DRAWN = 4
_SEED = 0


@dataclass(frozen=True)
class Point:
    """Values of some assumptions, and the figures that are looked at there; none named: all."""

    name: str
    changes: dict[str, float]
    figures: tuple[str, ...] = ()

    def task(self, task: Task) -> Under:
        return Under(task, tuple(sorted(self.changes.items())))

    def orderings(self, assumed: Assumptions) -> list[Ordering | None]:
        """In the same places everywhere; None: not looked at here."""
        chosen = orderings(assumed.under(self.changes))
        return [one if not self.figures or one.figure in self.figures else None for one in chosen]


def points() -> list[Point]:
    found = [Point("fixed", {})]
    for name, between in RANGES.items():
        found += [Point(f"{name}={value:g}", {name: value}, between.figures) for value in (between.low, between.high)]
    return [*found, *_drawn()]


def _drawn() -> Iterator[Point]:
    """Ranges may be wide, so places in them are those of logarithms."""
    rng = np.random.default_rng(_SEED)
    places = {name: (rng.permutation(_NUM_DRAWN) + rng.random(_NUM_DRAWN)) / _NUM_DRAWN for name in RANGES}
    for number in range(_NUM_DRAWN):
        changes = {
            name: float(between.low * (between.high / between.low) ** places[name][number])
            for name, between in RANGES.items()
        }
        yield Point(f"sample {number + 1}", changes)


@dataclass(frozen=True)
class Finding:
    """Of one ordering: by how much each number leads the one before it, at the least, by point."""

    ordering: Ordering
    fixed: dict[str, float]
    leads: dict[str, float]

    @property
    def closest(self) -> tuple[str, float]:
        return min(self.leads.items(), key=lambda one: one[1])

    @property
    def flips(self) -> list[str]:
        return [name for name, lead in self.leads.items() if lead <= 1]


@dataclass(frozen=True)
class Sensitivities:
    """What was found, as a table."""

    findings: list[Finding]
    drawn: list[Point]
    charts: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        lines = [f"sensitivity: {self._summary()}"]
        for one in self.findings:
            name, lead = one.closest
            held = f"{len(one.leads) - len(one.flips)} of {len(one.leads)}"
            lines.append(f"{one.ordering.figure:<9}{one.ordering.text}")
            lines.append(f"{'':<9}{_chain(one.fixed)}; holds at {held}, closest {lead:.2f} at {name}")
        for point in self.drawn:
            values = ", ".join(f"{name}={value:.3g}" for name, value in point.changes.items())
            lines.append(f"{point.name}: {values}")
        return "\n".join(lines)

    def markdown(self) -> str:
        return "\n".join(
            f"| {one.ordering.figure.removeprefix('fig')} | {one.ordering.text} | {_chain(one.fixed)} | "
            f"{len(one.leads) - len(one.flips)} of {len(one.leads)} | {_where(one)} |"
            for one in self.findings
        )

    def _summary(self) -> str:
        num_held = sum(not one.flips for one in self.findings)
        num_points = max(len(one.leads) for one in self.findings)
        return f"{num_held} of {len(self.findings)} orderings hold at all of up to {num_points} points"


def _chain(values: dict[str, float]) -> str:
    return " < ".join(f"{name} {number_in_words(value)}" for name, value in values.items())


def _where(one: Finding) -> str:
    name, lead = one.closest
    if not one.flips:
        return f"{lead:.2f} at {name}"
    return f"{lead:.2f} at {name}; flips at {', '.join(one.flips)}"


class Sensitivity:
    """Not a figure of the paper: all of them, under other assumptions."""

    name = "sensitivity"

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [
            point.task(task)
            for point in points()
            for ordering in point.orderings(assumed)
            if ordering is not None
            for task in ordering.tasks
        ]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Sensitivities:
        all_points = points()
        fixed = all_points[0]
        leads: list[dict[str, float]] = [{} for _ in orderings(assumed)]
        values: list[dict[str, float]] = [{} for _ in leads]
        for point in all_points:
            for number, ordering in enumerate(point.orderings(assumed)):
                if ordering is None:
                    continue
                own = {task: results[point.task(task)] for task in ordering.tasks}
                leads[number][point.name] = ordering.lead(own)
                if point is fixed:
                    values[number] = ordering.values(own)
        findings = [Finding(*parts) for parts in zip(orderings(assumed), values, leads, strict=True)]
        return Sensitivities(findings, [point for point in all_points if point.name.startswith("sample")])

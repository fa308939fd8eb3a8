"""Medians and quartiles of what was measured in rounds, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.errors import OptionError
from quire.interfaces.cli.bench_limits import MachineLimits


@dataclass
class Measure:
    """One quantity, once a round."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list)
    # what this machine allows at best, in the same unit; for a time it is the least, for a rate the greatest
    limit: float | None = None
    is_time: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def fraction(self) -> float | None:
        """How much of the limit was reached."""
        if not self.limit or not self.median:
            return None
        return self.limit / self.median if self.is_time else self.median / self.limit

    def as_dict(self) -> dict[str, Any]:
        first, third = self.quartiles
        numbers = {"median": self.median, "q1": first, "q3": third, "limit": self.limit, "fraction": self.fraction}
        rounded = {name: None if value is None else float(f"{value:.5g}") for name, value in numbers.items()}
        return {"unit": self.unit, **rounded, "values": [float(f"{value:.6g}") for value in self.values]}


def new_measure(name: str, unit: str, limit: float | None = None) -> Measure:
    """Units that are a time say so; all others are rates."""
    return Measure(name, unit, limit=limit, is_time=unit in ("s", "ms"))


@dataclass
class Result:
    """What one command measured."""

    workload: str
    title: str
    model: str
    settings: dict[str, Any]
    measures: list[Measure]
    limits: MachineLimits | None = None
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "title": self.title,
            "model": self.model,
            "settings": self.settings,
            "measures": {measure.name: measure.as_dict() for measure in self.measures if measure.values},
            "limits": self.limits.as_dict() if self.limits else None,
            "notes": list(self.notes),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine_in_words(),
            "load": os.getloadavg()[0],
        }

    def as_table(self) -> str:
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.settings.items())
        shown_measures = [measure for measure in self.measures if measure.values]
        width = max([28, *(len(measure.name) + 2 for measure in shown_measures)])
        header = f"{'':<{width}}{'median':>10}{'q1':>10}{'q3':>10}  {'':<9}{'limit':>10}{'of it':>8}{'rounds':>8}"
        lines = [f"{self.workload} {self.title}: {self.model}", shown, "", header]
        lines += [_row(measure, width) for measure in shown_measures]
        if self.limits is not None:
            rates = [f"read {self.limits.bandwidth / 1e9:.1f} GB/s"]
            rates += [f"{name} {rate / 1e9:.0f} GOP/s" for name, rate in self.limits.peaks.items()]
            lines += ["", f"limits of this machine, {self.limits.threads} threads: {', '.join(rates)}"]
        return "\n".join([*lines, *self.notes])

    def write(self, path: str) -> None:
        try:
            Path(path).write_text(json.dumps(self.as_dict()) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"--json {path}: cannot be written ({error.strerror}).") from None


def machine_in_words() -> str:
    """Processor and cores, as the operating system names them."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _row(measure: Measure, width: int) -> str:
    first, third = measure.quartiles
    numbers = "".join(f"{_short(value):>10}" for value in (measure.median, first, third))
    row = f"{measure.name:<{width}}{numbers}  {measure.unit:<9}"
    fraction = measure.fraction
    if fraction is None or measure.limit is None:
        return f"{row}{'':>18}{len(measure.values):>8}"
    return f"{row}{_short(measure.limit):>10}{fraction:>8.2f}{len(measure.values):>8}"


def _short(value: float) -> str:
    """Four figures are more than any of these measurements has."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"

"""What each further process counted when it was last heard. It stays in the sums: a counter that falls is misread.

Of one that answers, all it says is shown; of one that is silent or gone, what counts up, and nothing of what it has in
use. What a process that is killed counted since it was last heard is lost, and nobody has seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from quire.interfaces.gateway.access.endpoints import TENANT_COUNTS
from quire.interfaces.server.observing.metrics import added

# An answer to a question that is about counts: its form depends on the question.
Answer = Any


class KeptCounts:
    """Of processes by their numbers. What has ended is one sum, so that this does not grow with them."""

    def __init__(self) -> None:
        self._last: dict[str, dict[int, Answer]] = {name: {} for name in _SUMS}
        self._sums: dict[str, Answer] = {}

    @property
    def names(self) -> Collection[str]:
        """The questions that are about counts."""
        return _SUMS

    def saw(self, process: int, name: str, answer: Answer) -> None:
        self._last[name][process] = answer

    def buried(self, process: int) -> None:
        for name, last in self._last.items():
            if process in last:
                self._sums[name] = _SUMS[name](self._sums.get(name), last.pop(process))

    def answers(self, name: str, answered: Collection[int], asker: int | None) -> list[Answer]:
        """Everybody's but the asker's, each once, whatever happened while they were asked. `answered`: just now."""
        living = [
            last if process in answered else _SUMS[name](None, last)
            for process, last in self._last[name].items()
            if process != asker
        ]
        return [*living, self._sums[name]] if name in self._sums else living


# ---------------------------------------------------------------------------------- sums of what counts up, by question


def _sum_of_metrics(earlier: Answer | None, answer: Answer) -> Answer:
    before = earlier or {"instruments": {}, "statistics": {}}
    totals = {name: value for name, value in answer["statistics"].items() if name.endswith("_total")}
    instruments = {
        name: _sum_of_instrument(before["instruments"].get(name), values)
        for name, values in answer["instruments"].items()
    }
    return {"instruments": instruments, "statistics": added(before["statistics"], [totals])}


def _sum_of_instrument(earlier: list[Any] | None, values: list[Any]) -> list[Any]:
    """The forms are those of `snapshot` in observability/instruments.py."""
    if len(values) == 1 and not isinstance(values[0], list):
        return [0.0]  # a gauge
    if not earlier or not values:
        return earlier or values
    if not isinstance(values[0], list):
        return [one + other for one, other in zip(earlier, values, strict=True)]
    counts: dict[tuple[str, ...], float] = {}
    for labels, value in (*earlier, *values):
        counts[tuple(labels)] = counts.get(tuple(labels), 0.0) + value
    return [[list(labels), value] for labels, value in counts.items()]


def _sum_of_tenants(earlier: Answer | None, answer: Answer) -> Answer:
    before = {report["name"]: report for report in earlier or []}
    return [_sum_of_reports(before.get(report["name"], {}), report) for report in answer]


def _sum_of_reports(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    counts = {name: earlier.get(name, 0) + report[name] for name in TENANT_COUNTS}
    return {"name": report["name"], "num_requests": 0, **counts}


_SUMS: dict[str, Callable[[Answer | None, Answer], Answer]] = {"metrics": _sum_of_metrics, "tenants": _sum_of_tenants}

"""What processes that have died had counted: it stays in the sums, because a counter that falls is misread."""

from __future__ import annotations

from typing import Any

from quire.interfaces.server.processes.answers import added

Answer = dict[str, Any]


class MemoryOfTheDead:
    """Of the answers to "metrics". What a process counted since it was last asked is lost, and nobody has seen it."""

    def __init__(self) -> None:
        self._last: dict[int, Answer] = {}
        # sums of what counts up; numbers that go up and down end with their process
        self._instruments: dict[str, list[Any]] = {}
        self._statistics: dict[str, float] = {}

    def saw(self, process: int, answer: Answer) -> None:
        self._last[process] = answer

    def buried(self, process: int) -> None:
        last = self._last.pop(process, None)
        if last is None:
            return
        totals = {name: value for name, value in last["statistics"].items() if name.endswith("_total")}
        self._statistics = added(self._statistics, [totals])
        for name, values in last["instruments"].items():
            self._instruments[name] = _sum_of(self._instruments.get(name), values)

    @property
    def answers(self) -> list[Answer]:
        return [{"instruments": self._instruments, "statistics": self._statistics}] if self._instruments else []


def _sum_of(earlier: list[Any] | None, values: list[Any]) -> list[Any]:
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

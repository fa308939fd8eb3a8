"""Counters, gauges and histograms that cost a fraction of a microsecond, and show themselves to prometheus-client.

They belong to one event loop, so they need no locks; that is what makes them cheap enough to be used per token.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Labels = tuple[str, ...]


class Counter:
    """Counts by the values of its labels. `known`: those of a single label, which stand at 0 from the beginning, so
    that the first one counted shows as a rise."""

    def __init__(
        self, name: str, help_text: str, label_names: Sequence[str] = (), *, known: Sequence[str] = ()
    ) -> None:
        self.name, self.help_text, self.label_names = name, help_text, tuple(label_names)
        self._values: dict[Labels, float] = {(value,): 0.0 for value in known} if label_names else {(): 0.0}

    def add(self, amount: float = 1.0, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def value(self, *labels: str) -> float:
        return self._values.get(labels, 0.0)

    def snapshot(self) -> list[Any]:
        """For another process: labels and values."""
        return [[list(labels), value] for labels, value in self._values.items()]

    def plus(self, snapshots: Iterable[list[Any]]) -> Counter:
        """With what others have counted."""
        both = Counter(self.name, self.help_text, self.label_names)
        both._values = dict(self._values)
        for labels, value in itertools.chain.from_iterable(snapshots):
            both.add(value, *labels)
        return both

    def collect(self, model_name: str) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.help_text, labels=["model_name", *self.label_names])
        for labels, value in sorted(self._values.items()):
            family.add_metric([model_name, *labels], value)
        yield family


class Gauge:
    """A number that goes up and down. It is asked for when somebody looks. Of several processes the greatest counts."""

    def __init__(self, name: str, help_text: str) -> None:
        self.name = name
        self.help_text = help_text
        self.label_names: tuple[str, ...] = ()
        self.read: Callable[[], float] = float

    def snapshot(self) -> list[Any]:
        return [self.read()]

    def plus(self, snapshots: Iterable[list[Any]]) -> Gauge:
        both = Gauge(self.name, self.help_text)
        greatest = max(self.read(), *itertools.chain.from_iterable(snapshots), 0.0)
        both.read = lambda: greatest
        return both

    def collect(self, model_name: str) -> Iterator[Metric]:
        family = GaugeMetricFamily(self.name, self.help_text, labels=["model_name"])
        family.add_metric([model_name], self.read())
        yield family


class Histogram:
    """Counts by size; `bounds` are the upper ends of the buckets, in rising order."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help_text = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def bounds(self) -> tuple[float, ...]:
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """By bucket; the last one is of what lies above all bounds."""
        return tuple(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> list[Any]:
        return [self._sum, *self._counts]

    def plus(self, snapshots: Iterable[list[Any]]) -> Histogram:
        both = Histogram(self.name, self.help_text, self._bounds)
        all_of_them = list(zip([self._sum, *self._counts], *snapshots, strict=True))
        both._sum, *both._counts = (sum(values) for values in all_of_them)
        return both

    def collect(self, model_name: str) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.help_text, labels=["model_name"])
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        family.add_metric([model_name], buckets, self._sum)
        yield family

"""Requests that are drawn: lengths of a known workload, and times at which nobody waits for anybody (Poisson).

Lengths of ShareGPT and Alpaca are known by their means alone (figure 3.11); they are drawn from gamma distributions of
one shape. The others are tables of (prompt, output) that were taken from published traces (lengths/README.md).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from quire.simulation.arrivals import Arrival
from quire.simulation.traces.table import ReadTrace

_TABLES = Path(__file__).parent / "lengths"
# figure 3.11: mean tokens of prompts and of answers
_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
# standard deviation over mean
_VARIATION = 0.87
DEFAULT_REQUESTS = 1000
_DRAWN_AT_ONCE = 1024


def names() -> list[str]:
    return sorted([*_MEANS, *(path.stem for path in _TABLES.glob("*.csv"))])


@dataclass(frozen=True)
class DrawnTrace:
    """As many as are asked for, one at a time: it needs no memory."""

    name: str
    rate: float
    num_requests: int = DEFAULT_REQUESTS
    seed: int = 0
    has_contents: bool = False

    def arrivals(self) -> Iterator[Arrival]:
        rng = np.random.default_rng(self.seed)
        at = 0.0
        for number, (prompt, output) in enumerate(islice(_lengths(self.name, rng), self.num_requests)):
            # the first one comes at once
            at += float(rng.exponential(1 / self.rate)) if number else 0.0
            yield Arrival(at, prompt, output)


def at_rate(trace: ReadTrace, rate: float, num_requests: int | None, seed: int) -> Iterator[Arrival]:
    """The requests of a trace in their order, at drawn times; from the beginning again if there are too few."""
    rng = np.random.default_rng(seed)
    at = 0.0
    for number in range(num_requests if num_requests is not None else len(trace.table)):
        one = trace.table[number % len(trace.table)]
        at += float(rng.exponential(1 / rate)) if number else 0.0
        yield one.moved_to(at)


def _lengths(name: str, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Without end."""
    if name in _MEANS:
        shape = _VARIATION**-2
        while True:
            columns = [rng.gamma(shape, mean / shape, _DRAWN_AT_ONCE) for mean in _MEANS[name]]
            prompts, outputs = (np.maximum(1, np.rint(column)).astype(int).tolist() for column in columns)
            yield from zip(prompts, outputs, strict=True)
    with (_TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        table = [(int(prompt), int(output)) for prompt, output in list(csv.reader(file))[1:]]
    while True:
        for place in rng.integers(0, len(table), _DRAWN_AT_ONCE).tolist():
            yield table[place]

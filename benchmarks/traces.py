"""Request lengths like those of the data sets of figure 3.11. Used by sharing.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Trace:
    """Means as in 3.6.1; spreads (of the logarithm of a length) chosen so that the shapes are those of figure 3.11."""

    name: str
    mean_prompt: float
    spread_prompt: float
    mean_output: float
    spread_output: float


ALPACA = Trace("Alpaca", 19.31, 0.8, 58.45, 0.95)
SHAREGPT = Trace("ShareGPT", 161.31, 1.2, 337.99, 0.8)


def lengths(trace: Trace, count: int, greatest: int) -> list[tuple[int, int]]:
    """(prompt, output) of each request, log-normal, at most `greatest` tokens together.

    Evenly spaced quantiles in random pairs, so that few requests have the right mean and tail.
    """
    prompts = _quantiles(trace.mean_prompt, trace.spread_prompt, count, greatest // 2)
    outputs = _quantiles(trace.mean_output, trace.spread_output, count, greatest)
    random.Random(1).shuffle(prompts)
    random.Random(2).shuffle(outputs)
    return [(prompt, min(output, greatest - prompt)) for prompt, output in zip(prompts, outputs, strict=True)]


def _quantiles(mean: float, spread: float, count: int, greatest: int) -> list[int]:
    """Cut at `greatest`; the median is the one that gives this mean after the cut."""
    normal = NormalDist()
    factors = [math.exp(spread * normal.inv_cdf((place + 0.5) / count)) for place in range(count)]

    def cut(median: float) -> list[float]:
        return [min(greatest, max(1.0, median * factor)) for factor in factors]

    median = solve(lambda value: sum(cut(value)) / count, mean, greatest)
    return [round(length) for length in cut(median)]


def solve(rising: Callable[[float], float], wanted: float, greatest: float) -> float:
    """Where a rising function takes the wanted value, between 0 and `greatest`."""
    low, high = 0.0, float(greatest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high

"""Figures of a load: percentiles of what clients saw, and what a server's own metrics say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.support.load.plain_client import PlainClient

_SERIES = re.compile(r"^([^#\s{]+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
_BUCKET = re.compile(r'_bucket\{.*le="([^"]+)"')


def percentile(values: Iterable[float], percent: int) -> float:
    """0 of nothing; the 100th is the greatest."""
    ordered = sorted(values)
    return round(ordered[_rank(len(ordered), percent)], 4) if ordered else 0.0


def _rank(count: int, percent: int) -> int:
    return min(count - 1, count * percent // 100)


def percentiles(values: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"count": len(values)}
    found |= {f"p{percent}": percentile(values, percent) for percent in (50, 99, 100)}
    return found | note("p99", len(values))


def note(name: str, count: int) -> dict[str, str]:
    """What stands beside a 99th percentile: of few samples it is the greatest one, and as much a matter of luck."""
    is_greatest = count > 0 and _rank(count, 99) == count - 1
    return {f"{name}_is": f"the maximum of {count}"} if is_greatest else {}


async def metrics_of(place: tuple[str, int]) -> dict[str, float]:
    """All series of /metrics."""
    client = PlainClient(*place)
    text = (await client.get("/metrics")).body.decode()
    client.close()
    return {name: float(value) for name, value in _SERIES.findall(text)}


def bucket_of(before: dict[str, float], after: dict[str, float], name: str, percent: int) -> float:
    """Upper end of the histogram's bucket that holds this percentile of what was observed between two looks."""
    grown = _grown(before, after, name)
    total = grown.get(float("inf"), 0.0)
    return next((bound for bound in sorted(grown) if total and grown[bound] >= total * percent / 100), 0.0)


def buckets(before: dict[str, float], after: dict[str, float], name: str) -> dict[str, Any]:
    """As `percentiles`."""
    count = int(_grown(before, after, name).get(float("inf"), 0.0))
    found: dict[str, Any] = {"count": count}
    found |= {f"p{percent}": bucket_of(before, after, name, percent) for percent in (50, 99, 100)}
    # of a hundred, 99 are enough for a bucket
    return found | (note("p99", count) if count < 100 else {})


def _grown(before: dict[str, float], after: dict[str, float], name: str) -> dict[float, float]:
    grown = {}
    for series, value in after.items():
        found = _BUCKET.search(series) if series.startswith(name + "_bucket") else None
        if found is not None:
            grown[float(found[1])] = value - before.get(series, 0.0)
    return grown

"""Figures of a load: percentiles of what clients saw, and what a server's own metrics say."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.testing.load.plain_client import PlainClient

_SERIES = re.compile(r"^([^#\s{]+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
_BUCKET = re.compile(r'_bucket\{.*le="([^"]+)"')


def percentile(values: Iterable[float], percent: int) -> float:
    """0 of nothing; the 100th is the greatest."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 4) if ordered else 0.0


def percentiles(values: list[float]) -> dict[str, float]:
    return {"count": len(values), **{f"p{percent}": percentile(values, percent) for percent in (50, 99, 100)}}


async def metrics_of(place: tuple[str, int]) -> dict[str, float]:
    """All series of /metrics."""
    client = PlainClient(*place)
    text = (await client.get("/metrics")).body.decode()
    client.close()
    return {name: float(value) for name, value in _SERIES.findall(text)}


def bucket_of(before: dict[str, float], after: dict[str, float], name: str, percent: int) -> float:
    """Upper end of the histogram's bucket that holds this percentile of what was observed between two looks."""
    grown = {}
    for series, value in after.items():
        found = _BUCKET.search(series) if series.startswith(name + "_bucket") else None
        if found is not None:
            grown[float(found[1])] = value - before.get(series, 0.0)
    total = grown.get(float("inf"), 0.0)
    return next((bound for bound in sorted(grown) if total and grown[bound] >= total * percent / 100), 0.0)

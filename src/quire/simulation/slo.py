"""What was promised to users: `ttft_p90<1s,tpot_p90<50ms`. A term without a share is asked of every request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import OptionError, suggestion
from quire.simulation.records import Record

METRICS = ("ttft", "tpot", "latency", "normalized_latency")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_TERM = re.compile(r"([a-z_]+?)(?:_(p\d{1,2}(?:\.\d+)?|mean))?\s*<\s*([\d.eE+-]+)\s*([a-z]*)")


@dataclass(frozen=True)
class Term:
    """One metric that stays below a bound: its mean, a percentile of it, or that of every request."""

    metric: str
    statistic: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric}{'_' if self.statistic else ''}{self.statistic}<{self.seconds:g}s"


@dataclass(frozen=True)
class Slo:
    """All of its terms are to hold."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Slo:
        return cls(tuple(_term(part.strip()) for part in text.split(",") if part.strip()))

    def is_met_by(self, record: Record) -> bool:
        """Goodput counts requests by the bounds alone, whatever share of them is promised."""
        return all(getattr(record, term.metric) < term.seconds for term in self.terms)

    def verdicts(self, statistics: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
        """By term, whether it holds; `statistics` by metric and by name: mean, p50, max and so on."""
        return {
            str(term): statistics[term.metric][term.statistic or "max"] < term.seconds for term in self.terms
        }  # fmt: skip


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise OptionError(f"slo={text[:60]}: a term looks like ttft_p90<1s, tpot<50ms or latency_mean<2s.")
    metric, statistic, number, unit = match.groups()
    if metric not in METRICS:
        raise OptionError(
            f"slo={text[:60]}: {metric} must be one of {', '.join(METRICS)}.{suggestion(metric, METRICS)}"
        )
    try:
        seconds = float(number) * _UNITS[unit or "s"]
    except (ValueError, KeyError):
        raise OptionError(f"slo={text[:60]}: the bound must be a number of {', '.join(_UNITS)}.") from None
    if not 0 < seconds < 1e9:
        raise OptionError(f"slo={text[:60]}: nothing can stay below that bound. It must be above 0.")
    return Term(metric, statistic or "", seconds)


def percentile_of(name: str) -> float | None:
    """Of p90 90; None for other statistics."""
    return float(name[1:]) if re.fullmatch(r"p\d+(\.\d+)?", name) else None

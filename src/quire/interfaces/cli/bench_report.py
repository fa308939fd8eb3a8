"""The numbers of `quire bench`: what was measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_PERCENTILES = (50, 90, 99)


@dataclass
class Timeline:
    """When the tokens of one request came. Tokens that came together share a time."""

    num_prompt_tokens: int
    start: float
    # of the prompt, what was there before
    num_cached_tokens: int = 0
    # of a chain of calls
    is_first: bool = True
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now: float, num_tokens: int) -> None:
        if num_tokens:
            self.arrivals.append((now, num_tokens))

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0][0] - self.start

    @property
    def latency(self) -> float:
        return self.arrivals[-1][0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Time between tokens as a reader sees them: a piece of several tokens is one gap."""
        times = [now for now, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def time_per_token(self) -> float | None:
        """Mean time per token after the first piece (TPOT)."""
        following = sum(count for _, count in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / following if following else None

    @property
    def normalized_latency(self) -> float:
        """Time per token from the arrival on, waiting included (3.6.1)."""
        return self.latency / self.num_tokens


@dataclass
class Report:
    """One run."""

    model: str
    load: dict[str, Any]
    timelines: list[Timeline]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Seconds are milliseconds here, except `seconds`."""
        prompt = sum(timeline.num_prompt_tokens for timeline in self.timelines)
        output = sum(timeline.num_tokens for timeline in self.timelines)
        return {
            "model": self.model,
            "load": self.load,
            "seconds": round(self.seconds, 4),
            "requests_per_second": round(len(self.timelines) / self.seconds, 3),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "output_tokens_per_second": round(output / self.seconds, 2),
            "total_tokens_per_second": round((prompt + output) / self.seconds, 2),
            **{name: _summary(values) for name, values in self._distributions().items()},
        }

    def _distributions(self) -> dict[str, list[float]]:
        done = [timeline for timeline in self.timelines if timeline.arrivals]
        per_token = [timeline.time_per_token for timeline in done]
        return {
            "time_to_first_token_ms": [timeline.time_to_first_token for timeline in done],
            "inter_token_latency_ms": [gap for timeline in done for gap in timeline.gaps],
            "time_per_output_token_ms": [value for value in per_token if value is not None],
            "normalized_latency_ms": [timeline.normalized_latency for timeline in done],
            "request_latency_ms": [timeline.latency for timeline in done],
        }

    def as_table(self) -> str:
        numbers = self.as_dict()
        load = {**self.load, "concurrency": self.load.get("concurrency") or "unlimited"}
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in load.items())
        lines = [
            f"{self.model}: {shown}",
            "",
            f"{'duration':<26}{self.seconds:>12.2f} s",
            f"{'requests':<26}{numbers['requests_per_second']:>12.2f} /s",
            f"{'output tokens':<26}{numbers['output_tokens_per_second']:>12.1f} /s",
            f"{'prompt and output tokens':<26}{numbers['total_tokens_per_second']:>12.1f} /s",
            "",
            f"{'milliseconds':<26}" + "".join(f"{title:>10}" for title in ("mean", "p50", "p90", "p99", "max")),
        ]
        for name in self._distributions():
            title = name.removesuffix("_ms").replace("_", " ")
            lines.append(f"{title:<26}" + "".join(f"{value:>10.2f}" for value in numbers[name].values()))
        return "\n".join(lines)


def percentile(values: Sequence[float], share: int) -> float:
    """Nearest rank; nothing measured is 0."""
    ordered = sorted(values) or [0.0]
    return ordered[max(1, -(-len(ordered) * share // 100)) - 1]


def _summary(seconds: list[float]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and greatest, in milliseconds; nothing measured is 0."""
    ordered = sorted(value * 1e3 for value in seconds) or [0.0]
    ranks = {f"p{share}": percentile(ordered, share) for share in _PERCENTILES}
    values = {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in values.items()}

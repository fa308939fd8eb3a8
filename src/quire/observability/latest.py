"""What the front end's counters say about the last seconds: throughput and latency, from samples of their totals.

Counters only ever grow, so the difference of two samples is what happened between them. A sample is taken when somebody
looks; the first look sees everything since the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.observability.instruments import Counter, Histogram
from quire.observability.metrics import ServerMetrics

THROUGHPUT_SECONDS = 5.0
LATENCY_SECONDS = 30.0
Instrument = TypeVar("Instrument", Counter, Histogram)


@dataclass(frozen=True)
class _Sample:
    at: float
    generated: float
    prompts: float
    first_token: tuple[int, ...]
    between_tokens: tuple[int, ...]


class Latest:
    """Samples of one server's metrics, as far back as they are needed."""

    def __init__(self, metrics: ServerMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._samples: deque[_Sample] = deque([self._sample(())])

    def numbers(self, snapshots: Sequence[Mapping[str, list[Any]]] = ()) -> dict[str, Any]:
        """`throughput` and `latency`; a latency is None where nothing was measured in the time. `snapshots`: of the
        other processes of the server, which are added."""
        now = self._sample(snapshots)
        self._samples.append(now)
        # the newest of those that are old enough stays
        while len(self._samples) > 2 and self._samples[1].at <= now.at - LATENCY_SECONDS:
            self._samples.popleft()
        recent = self._before(now.at - THROUGHPUT_SECONDS)
        seconds = max(now.at - recent.at, 1e-9)
        metrics = self._metrics
        oldest = self._samples[0]
        return {
            "throughput": {
                "generated_tokens_per_second": max(0.0, now.generated - recent.generated) / seconds,
                "prompt_tokens_per_second": max(0.0, now.prompts - recent.prompts) / seconds,
                "generated_tokens_total": now.generated,
                "prompt_tokens_total": now.prompts,
            },
            "latency": {
                "time_to_first_token": _quantiles(metrics.time_to_first_token, oldest.first_token, now.first_token),
                "between_tokens": _quantiles(metrics.inter_token_latency, oldest.between_tokens, now.between_tokens),
            },
        }

    def _before(self, time: float) -> _Sample:
        """The newest sample that is at least so old, or the oldest there is."""
        found = self._samples[0]
        for sample in self._samples:
            if sample.at > time:
                break
            found = sample
        return found

    def _sample(self, snapshots: Sequence[Mapping[str, list[Any]]]) -> _Sample:
        metrics = self._metrics

        def of_all(instrument: Instrument) -> Instrument:
            return instrument.plus([one[instrument.name] for one in snapshots if instrument.name in one])

        return _Sample(
            self._clock(),
            of_all(metrics.generation_tokens).value(),
            of_all(metrics.prompt_tokens).value(),
            of_all(metrics.time_to_first_token).counts,
            of_all(metrics.inter_token_latency).counts,
        )


def _quantiles(histogram: Histogram, before: Sequence[int], now: Sequence[int]) -> dict[str, float] | None:
    # less than before: a process of the server did not answer in time
    counts = [max(0, later - earlier) for earlier, later in zip(before, now, strict=True)]
    total = sum(counts)
    if not total:
        return None
    return {
        "count": total,
        "p50_seconds": quantile(histogram.bounds, counts, 0.5),
        "p95_seconds": quantile(histogram.bounds, counts, 0.95),
    }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Evenly spread within a bucket; what lies above the last bound counts as that bound."""
    wanted = share * sum(counts)
    below = 0.0
    passed = 0
    for bound, count in zip(bounds, counts, strict=False):
        if count and passed + count >= wanted:
            return below + (bound - below) * (wanted - passed) / count
        below = bound
        passed = passed + count
    return bounds[-1]

"""What a simulation comes to: latencies, goodput, what caches and memory did, what each device did. Plain data."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from quire.engine_core.executor.modelled import Floats
from quire.simulation.gaps import Gaps
from quire.simulation.records import EngineWork, Record
from quire.simulation.slo import METRICS, Slo, percentile_of

_SHARES = ("p50", "p90", "p99")


class Tally:
    """Takes records one by one and keeps a few numbers of each."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo or Slo()
        self.num_completed = 0
        self.num_good = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.last_end = 0.0
        self.errors: Counter[str] = Counter()
        self._values: dict[str, array[float]] = {metric: array("d") for metric in METRICS}

    def add(self, record: Record) -> None:
        self.last_end = max(self.last_end, record.ended_at)
        if record.error:
            self.errors[record.error] += 1
            return
        self.num_completed += 1
        self.num_good += self.slo.is_met_by(record)
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_output_tokens += record.num_output_tokens
        for metric, values in self._values.items():
            values.append(getattr(record, metric))

    def values(self, metric: str) -> Floats:
        return np.frombuffer(self._values[metric], dtype=np.float64)

    def statistics(self) -> dict[str, dict[str, float]]:
        """By metric: mean, percentiles and the greatest, with those that the objective names."""
        names = {*_SHARES, *(term.statistic for term in self.slo.terms if percentile_of(term.statistic) is not None)}
        found: dict[str, dict[str, float]] = {}
        for metric in METRICS:
            values = self.values(metric)
            if not len(values):
                found[metric] = dict.fromkeys(("mean", *sorted(names), "max"), float("nan"))
                continue
            shares = {name: float(np.percentile(values, percentile_of(name) or 0.0)) for name in sorted(names)}
            found[metric] = {"mean": float(values.mean()), **shares, "max": float(values.max())}
        return found


def summary_of(
    tally: Tally, works: list[EngineWork], statistics: list[dict[str, float]], devices_per_engine: int
) -> dict[str, Any]:
    """Of a run with so many engines. Seconds run from the first arrival to the last end."""
    seconds = max(tally.last_end, 1e-12)
    latencies = tally.statistics()
    gaps = Gaps()
    for work in works:
        gaps.merge(work.gaps)
    total = Counter[str]()
    for one in statistics:
        total.update(one)
    summary: dict[str, Any] = {
        "seconds": seconds,
        "requests": {
            "completed": tally.num_completed,
            "failed": sum(tally.errors.values()),
            "errors": dict(tally.errors.most_common(5)),
            "per_second": tally.num_completed / seconds,
        },
        "tokens": {
            "prompt": tally.num_prompt_tokens,
            "cached": tally.num_cached_tokens,
            "output": tally.num_output_tokens,
            "output_per_second": tally.num_output_tokens / seconds,
        },
        "ttft_s": latencies["ttft"],
        "inter_token_s": {
            "mean": gaps.mean,
            **{name: gaps.percentile(percentile_of(name) or 0.0) for name in _SHARES},
            "max": gaps.longest,
        },
        "tpot_s": latencies["tpot"],
        "latency_s": latencies["latency"],
        "normalized_latency_s": latencies["normalized_latency"],
        "cache_hit_rate": tally.num_cached_tokens / max(1, tally.num_prompt_tokens),
        "preemptions": {
            "recomputed": total["num_preemptions_by_recompute_total"],
            "swapped": total["num_preemptions_by_swap_total"],
            "recomputed_tokens": total["recomputed_tokens_total"],
        },
        "engines": [
            _engine(work, one, seconds, devices_per_engine) for work, one in zip(works, statistics, strict=True)
        ],
    }
    if tally.slo.terms:
        verdicts = tally.slo.verdicts(latencies)
        summary["slo"] = {
            "terms": verdicts,
            "is_met": all(verdicts.values()) and not tally.errors,
            "good_requests": tally.num_good / max(1, tally.num_completed),
            "goodput_per_second": tally.num_good / seconds,
        }
    return summary


def _engine(work: EngineWork, statistics: dict[str, float], seconds: float, num_devices: int) -> dict[str, float]:
    busy = max(work.busy_seconds, 1e-12)
    return {
        "devices": num_devices,
        "busy": work.busy_seconds / seconds,
        "steps": work.num_steps,
        "tokens_per_step": work.num_tokens / max(1, work.num_steps),
        "sequences_per_step": work.rows_by_step / max(1, work.num_steps),
        # while it computes: the paper's batched requests (3.6.2)
        "sequences_at_once": work.row_seconds / busy,
        "kv_blocks_held": work.block_seconds / busy / max(1.0, statistics["num_blocks"]),
        "kv_blocks_evicted": statistics["num_blocks_evicted_total"],
    }

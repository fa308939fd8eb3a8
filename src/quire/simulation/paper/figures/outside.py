"""What lies outside of the paper's numbers, and a further run of each with one thing changed: the reason, alone.

Rates are what a system serves when requests wait from the start (`CapacityOf`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.experiment import Case
from quire.simulation.paper.lab import CapacityOf, RunAt, Task, Under
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import FASTER_TRANSFORMER, MAX, OPT_13B, OPT_175B, ORACLE, PAGED, Setup
from quire.simulation.paper.workloads import ALPACA, CHAT, SHAREGPT, Workload

_AS_FIXED: dict[str, float] = {}
_NO_HOST_TIME = {"seconds_per_sequence": 10e-6}
_LESS_HOST_TIME = {"seconds_per_sequence": 0.33e-3}
# so quick that computing a prompt takes next to nothing
_FREE_PROMPTS = {**_NO_HOST_TIME, "compute_share": 50.0}
_BEAMS = replace(ALPACA, num_sequences=6, is_beam_search=True)


@dataclass(frozen=True)
class Factor:
    """Of vLLM over another system."""

    name: str
    paper: float | tuple[float, float]
    setup: Setup
    workload: Workload
    num_requests: int
    other: str = ORACLE

    def tasks(self, changes: Mapping[str, float]) -> list[Under]:
        runs = [CapacityOf(Case(one, self.setup, self.workload), self.num_requests) for one in (PAGED, self.other)]
        return [Under(run, tuple(sorted(changes.items()))) for run in runs]


_FACTORS = (
    (Factor("3.12c, vLLM / Orca (Oracle)", (1.7, 2.7), OPT_175B, SHAREGPT, 400), _NO_HOST_TIME, "no host time"),
    (Factor("3.12c, vLLM / Orca (Max)", (2.7, 8.0), OPT_175B, SHAREGPT, 400, MAX), _NO_HOST_TIME, "no host time"),
    (Factor("3.14, 6 beams, vLLM / Orca (Oracle)", 2.3, OPT_13B, _BEAMS, 80), _NO_HOST_TIME, "no host time"),
    (Factor("3.17, vLLM / Orca (Max)", 2.0, OPT_13B, CHAT, 150, MAX), _FREE_PROMPTS, "prompts for nothing"),
)
# whose latency is above the bound at any rate, because answers wait for the end of their batch
_BATCHES = Factor("3.12c, vLLM / FasterTransformer, whatever latency is", (1.0, 22.0), OPT_175B, SHAREGPT, 200,
                  FASTER_TRANSFORMER)  # fmt: skip


class Outside:
    """No figure of the paper."""

    name = "outside"
    _ALPACA = RunAt(Case(PAGED, OPT_13B, ALPACA), 30.0, 1500)

    def _requests(self, changes: Mapping[str, float]) -> Under:
        return Under(self._ALPACA, tuple(sorted(changes.items())))

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        found: list[Task] = [self._requests(changes) for changes in (_AS_FIXED, _LESS_HOST_TIME)]
        for factor, changes, _ in _FACTORS:
            found += [*factor.tasks(_AS_FIXED), *factor.tasks(changes)]
        return [*found, *_BATCHES.tasks(_AS_FIXED)]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        def ratio(factor: Factor, changes: Mapping[str, float]) -> float:
            paged, other = factor.tasks(changes)
            return float(results[paged] / results[other])

        lines = [
            Line(f"3.13, Alpaca, vLLM: {text}", results[self._requests(changes)].num_batched, 132.44)
            for text, changes in (("as fixed", _AS_FIXED), ("0.33 ms of the host", _LESS_HOST_TIME))
        ]
        for factor, changes, text in _FACTORS:
            lines.append(Line(f"{factor.name}: as fixed", ratio(factor, _AS_FIXED), factor.paper))
            lines.append(Line(f"{factor.name}: {text}", ratio(factor, changes), factor.paper))
        lines.append(Line(_BATCHES.name, ratio(_BATCHES, _AS_FIXED), _BATCHES.paper))
        return Report(self.name, "what lies outside, with one thing changed", lines)

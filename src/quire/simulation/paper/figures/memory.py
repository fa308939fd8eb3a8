"""Table 3.1, figure 3.2 and figure 3.13: how much memory there is, what it holds, and how many requests that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from quire.simulation.charts.bar_chart import Panel, bar_charts
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.experiment import Case, Measured
from quire.simulation.paper.lab import RunAt, Task
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import (
    MAX,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    ORCAS,
    PAGED,
    POW2,
    Setup,
    deploy_system,
)
from quire.simulation.paper.workloads import ALPACA, SHAREGPT, Workload

_SYSTEMS = (*ORCAS, PAGED)
TABLE_3_1 = {OPT_13B: 15_700, OPT_66B: 9_700, OPT_175B: 60_100}
_KINDS = ("token states", "reserved", "internal fragmentation", "external fragmentation, others")
# shares of the KV cache, of those kinds; what the paper does not say of vLLM is one number there
FIGURE_3_2: dict[str, tuple[float | None, ...]] = {
    MAX: (20.4, 13.3, 57.3, 8.9),
    POW2: (26.8, 17.9, 13.6, 41.6),
    ORACLE: (38.2, 25.2, None, 36.6),
    PAGED: (96.3, None, None, None),
}


class SlotTable:
    """Needs no run: the memory of each configuration, with the one share that is assumed."""

    name = "table3.1"

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return ()

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines = [Line(setup.model, num_slots(setup, assumed), slots) for setup, slots in TABLE_3_1.items()]
        return Report(self.name, "KV cache slots", lines)


def num_slots(setup: Setup, assumed: Assumptions) -> int:
    capacity = deploy_system(PAGED, setup, assumed).capacity
    return capacity.available_bytes // sum(layer.bytes_per_token for layer in capacity.layers)


def _run(system: str, workload: Workload, rate: float, num_requests: int) -> RunAt:
    return RunAt(Case(system, OPT_13B, workload), rate, num_requests)


def _on_sharegpt(system: str) -> RunAt:
    """2 requests a second."""
    return _run(system, SHAREGPT, 2.0, 3600)


def _on_alpaca(system: str) -> RunAt:
    return _run(system, ALPACA, 30.0, 6000)


class Waste:
    """Shares of the KV cache by what they hold."""

    name = "fig3.2"

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [_on_sharegpt(system) for system in _SYSTEMS]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines = [
            Line(f"{system}: {kind}", 100 * ours, paper, " %")
            for system, shares in FIGURE_3_2.items()
            for kind, ours, paper in zip(_KINDS, astuple(results[_on_sharegpt(system)].memory), shares, strict=True)
        ]
        panel = Panel(
            "",
            [_short(system) for system in _SYSTEMS],
            {
                "paper": [FIGURE_3_2[system][0] for system in _SYSTEMS],
                "ours": [100 * results[_on_sharegpt(system)].memory.token_states for system in _SYSTEMS],
            },
        )
        chart = bar_charts("Token states in % of the KV cache", [panel], columns=1)
        return Report(self.name, "what the KV cache holds, OPT-13B, ShareGPT at 2 requests/s", lines, {"fig3.2": chart})


class BatchedRequests:
    """How many requests run at once."""

    name = "fig3.13"

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [run(system) for system in _SYSTEMS for run in (_on_sharegpt, _on_alpaca)]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        papers = {
            "ShareGPT, 2 requests/s": (7.00, 9.81, 13.62, 30.42),
            "Alpaca, 30 requests/s": (7.00, 43.24, 72.75, 132.44),
        }
        lines, panels = [], []
        for (title, paper), run in zip(papers.items(), (_on_sharegpt, _on_alpaca), strict=True):
            measured: list[Measured] = [results[run(system)] for system in _SYSTEMS]
            ours = [one.num_batched for one in measured]
            dataset = title.partition(",")[0]
            lines += [
                Line(f"{dataset}: {system}", mine, theirs)
                for system, mine, theirs in zip(_SYSTEMS, ours, paper, strict=True)
            ]
            lines.append(Line(f"{dataset}: vLLM / Orca (Oracle)", ours[3] / ours[2], paper[3] / paper[2]))
            lines.append(Line(f"{dataset}: vLLM / Orca (Max)", ours[3] / ours[0], paper[3] / paper[0]))
            groups = [_short(system) for system in _SYSTEMS]
            panels.append(Panel(title, groups, {"paper": list(paper), "ours": list(ours)}))
        chart = bar_charts("Requests that run at once, OPT-13B", panels)
        return Report(self.name, "batched requests, OPT-13B", lines, {"fig3.13": chart})


def _short(system: str) -> str:
    return system.removeprefix("Orca (").removesuffix(")")

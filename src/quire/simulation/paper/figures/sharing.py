"""Figure 3.15: blocks that sharing saves, of those that there would be without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.simulation.charts.bar_chart import Panel, bar_charts
from quire.simulation.paper.assumptions import RANGES, Assumptions
from quire.simulation.paper.experiment import Case
from quire.simulation.paper.lab import RunAt, Task, Under
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import OPT_13B, ORACLE, PAGED
from quire.simulation.paper.workloads import ALPACA, SHAREGPT, Workload

# beams whose candidates are about alike, and beams of which one is far ahead
_RANGE = (RANGES["confidence"].low, RANGES["confidence"].high)


def _under(run: RunAt, confidence: float) -> Under:
    return Under(run, (("confidence", confidence),))


class SavedBlocks:
    """At rates that all keep up with; what a request saves does not depend on how many run beside it."""

    name = "fig3.15"
    _WIDTHS = (2, 4, 6)
    _PAPER: dict[tuple[str, bool], tuple[float | tuple[float, float], ...]] = {
        (ALPACA.name, False): (6.09, 8.53, 9.79),
        (ALPACA.name, True): (37.56, 53.13, 55.16),
        (SHAREGPT.name, False): (16.2, (16.2, 30.5), 30.5),
        (SHAREGPT.name, True): (44.3, (44.3, 66.3), 66.3),
    }

    @staticmethod
    def _run(dataset: Workload, n: int, is_beam_search: bool, system: str = PAGED) -> RunAt:
        workload = replace(dataset, num_sequences=n, is_beam_search=is_beam_search)
        rate, num_requests = (4.0, 300) if dataset is ALPACA else (0.4, 120)
        return RunAt(Case(system, OPT_13B, workload), rate / n * 2, num_requests)

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        plain: list[Task] = [
            self._run(dataset, n, is_beam)
            for dataset in (ALPACA, SHAREGPT)
            for is_beam in (False, True)
            for n in self._WIDTHS
        ]
        # 3.4.4: contiguous memory copies all that a beam's parent has computed
        naive = [self._run(ALPACA, n, True, ORACLE) for n in self._WIDTHS]
        return [*plain, *naive, *(_under(self._run(ALPACA, n, True), value) for n in self._WIDTHS for value in _RANGE)]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines, panels = [], []
        for dataset in (ALPACA, SHAREGPT):
            for is_beam in (False, True):
                kind = "beams" if is_beam else "parallel samples"
                paper = self._PAPER[dataset.name, is_beam]
                ours = [100 * results[self._run(dataset, n, is_beam)].saved_share for n in self._WIDTHS]
                lines += [
                    Line(f"{dataset.name}: {n} {kind}", mine, theirs, " %")
                    for n, mine, theirs in zip(self._WIDTHS, ours, paper, strict=True)
                ]
                shown: list[float | None] = [theirs if isinstance(theirs, float) else None for theirs in paper]
                groups = [str(n) for n in self._WIDTHS]
                panels.append(Panel(f"{dataset.name}, {kind}", groups, {"paper": shown, "ours": list(ours)}))
        for n in self._WIDTHS:
            # 3.3: what samples of one prompt could share; the paper does not say of how many
            prompts = results[self._run(ALPACA, n, False)].prompt_share
            lines.append(Line(f"Alpaca: {n} parallel samples, prompts' share of the tokens", 100 * prompts, 12.0, " %"))
            naive = results[self._run(ALPACA, n, True, ORACLE)].num_copied_blocks
            copied = results[self._run(ALPACA, n, True)].num_copied_blocks / max(1.0, naive)
            lines.append(Line(f"Alpaca: {n} beams, blocks copied of those without sharing", 100 * copied, None, " %"))
            for value in _RANGE:
                share = results[_under(self._run(ALPACA, n, True), value)].saved_share
                lines.append(Line(f"Alpaca: {n} beams, confidence {value:g}", 100 * share, None, " %"))
        chart = bar_charts("Blocks saved by sharing in %", panels)
        return Report(self.name, "blocks saved by sharing, OPT-13B", lines, {"fig3.15": chart})

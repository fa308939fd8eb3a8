"""Figures 3.12, 3.14, 3.16 and 3.17: the rate at which the latency of each system explodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.simulation.charts.line_chart import Line as Curve
from quire.simulation.charts.line_chart import line_chart
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.experiment import Case, Knee
from quire.simulation.paper.lab import KneeOf, Task
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import (
    FASTER_TRANSFORMER,
    LLAMA_13B,
    MAX,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    ORCAS,
    PAGED,
    POW2,
    Setup,
)
from quire.simulation.paper.workloads import ALPACA, CHAT, SHAREGPT, Workload, translation

# where searches begin, of what vLLM is expected to reach
_HEAD_STARTS = {PAGED: 1.0, ORACLE: 0.5, POW2: 0.35, MAX: 0.25, FASTER_TRANSFORMER: 0.06}
_ALL = (PAGED, ORACLE, POW2, MAX, FASTER_TRANSFORMER)


def _knee(system: str, setup: Setup, workload: Workload, start: float, num_requests: int, **options: Any) -> KneeOf:
    case = Case(system, setup, workload, tuple(sorted(options.items())))
    return KneeOf(case, start * _HEAD_STARTS[system], num_requests)


def _curves(results: dict[Task, Any], tasks: dict[str, KneeOf], title: str) -> str:
    """Normalized latency over the rate, as far as the search has looked."""
    curves = []
    for system, task in tasks.items():
        knee: Knee = results[task]
        points = [(one.rate, one.normalized_latency) for one in knee.points if not one.was_given_up]
        curves.append(Curve(f"{system} {knee.rate:.3g}", points))
    return line_chart(title, "requests a second", "seconds a token", curves, log_x=True, log_y=True)


class BasicSampling:
    """One sample a request: three models, two datasets."""

    name = "fig3.12"
    # where the search for vLLM begins, and how many requests a run has
    _PANELS = (
        ("a", OPT_13B, SHAREGPT, 2.0, 600),
        ("b", OPT_66B, SHAREGPT, 0.9, 600),
        ("c", OPT_175B, SHAREGPT, 2.2, 900),
        ("d", OPT_13B, ALPACA, 28.0, 2000),
        ("e", OPT_66B, ALPACA, 20.0, 2000),
        ("f", OPT_175B, ALPACA, 22.0, 2000),
    )

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [task for panel in self._PANELS for task in self._of(panel).values()]

    @staticmethod
    def _of(panel: tuple[str, Setup, Workload, float, int]) -> dict[str, KneeOf]:
        _, setup, workload, start, num_requests = panel
        return {system: _knee(system, setup, workload, start, num_requests) for system in _ALL}

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines, charts = [], {}
        over_oracle: dict[str, float] = {}
        for panel in self._PANELS:
            letter, setup, workload, _, _ = panel
            tasks = self._of(panel)
            rates = {system: results[task].rate for system, task in tasks.items()}
            title = f"{letter} {setup.model} {workload.name}"
            is_long = workload is SHAREGPT
            lines.append(Line(f"{title}: vLLM, requests/s", rates[PAGED]))
            over_oracle[letter] = rates[PAGED] / rates[ORACLE]
            lines.append(Line(f"{title}: vLLM / Orca (Oracle)", over_oracle[letter], (1.7, 2.7) if is_long else None))
            lines.append(Line(f"{title}: vLLM / Orca (Pow2)", rates[PAGED] / rates[POW2]))
            lines.append(
                Line(f"{title}: vLLM / Orca (Max)", rates[PAGED] / rates[MAX], (2.7, 8.0) if is_long else None)
            )
            ft = rates[PAGED] / rates[FASTER_TRANSFORMER]
            lines.append(Line(f"{title}: vLLM / FasterTransformer", ft, (1.0, 22.0) if is_long else None))
            charts[f"fig3.12{letter}"] = _curves(results, tasks, f"{setup.model}, {workload.name}")
        # 3.6.2: with much memory and short sequences the systems become bound by arithmetic
        lines.append(
            Line("advantage over Orca (Oracle) in f, of that in e", over_oracle["f"] / over_oracle["e"], (0.0, 1.0))
        )
        return Report(self.name, "rates that systems keep up with, basic sampling", lines, charts)


class Decoding:
    """Parallel sampling and beam search, OPT-13B on Alpaca."""

    name = "fig3.14"
    _WIDTHS = (2, 4, 6)

    @staticmethod
    def _of(workload: Workload) -> dict[str, KneeOf]:
        start = 24.0 / workload.num_sequences
        return {system: _knee(system, OPT_13B, workload, start, 600) for system in (PAGED, ORACLE)}

    def _workloads(self) -> list[Workload]:
        parallel = [replace(ALPACA, num_sequences=n) for n in self._WIDTHS]
        return [*parallel, *(replace(one, is_beam_search=True) for one in parallel)]

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        basic = BasicSampling().tasks(assumed)
        alpaca = [task for task in basic if isinstance(task, KneeOf) and task.case.workload is ALPACA]
        of_13b = [task for task in alpaca if task.case.setup is OPT_13B and task.case.system in (PAGED, ORACLE)]
        return [*of_13b, *(task for workload in self._workloads() for task in self._of(workload).values())]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        basic = {task.case.system: results[task].rate for task in self.tasks(assumed)[:2] if isinstance(task, KneeOf)}
        lines = [Line("basic sampling: vLLM / Orca (Oracle)", basic[PAGED] / basic[ORACLE], 1.3)]
        charts = {}
        for workload in self._workloads():
            tasks = self._of(workload)
            n = workload.num_sequences
            kind = "beams" if workload.is_beam_search else "parallel samples"
            factor = results[tasks[PAGED]].rate / results[tasks[ORACLE]].rate
            paper = 2.3 if workload.is_beam_search and n == 6 else None
            lines.append(Line(f"{n} {kind}: vLLM / Orca (Oracle)", factor, paper))
            if n == self._WIDTHS[-1]:
                name = "fig3.14" + ("_beams" if workload.is_beam_search else "_parallel")
                charts[name] = _curves(results, tasks, f"{n} {kind}, OPT-13B, Alpaca")
        return Report(self.name, "parallel sampling and beam search, OPT-13B, Alpaca", lines, charts)


class SharedPrefix:
    """Translation: prompts that begin with the same examples, LLaMA-13B."""

    name = "fig3.16"

    @staticmethod
    def _of(num_examples: int, num_tokens: int, assumed: Assumptions) -> dict[str, KneeOf]:
        workload = translation(num_examples, num_tokens, assumed)
        paged = _knee(PAGED, LLAMA_13B, workload, 30.0, 1500, enable_prefix_caching=True)
        return {PAGED: paged, ORACLE: _knee(ORACLE, LLAMA_13B, workload, 30.0, 1500)}

    def _panels(self, assumed: Assumptions) -> list[tuple[str, float, dict[str, KneeOf]]]:
        return [("1 example, 80 tokens", 1.67, self._of(1, 80, assumed)),
                ("5 examples, 341 tokens", 3.58, self._of(5, 341, assumed))]  # fmt: skip

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [task for _, _, tasks in self._panels(assumed) for task in tasks.values()]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines, charts = [], {}
        for title, paper, tasks in self._panels(assumed):
            rates = {system: results[task].rate for system, task in tasks.items()}
            lines.append(Line(f"{title}: vLLM, requests/s", rates[PAGED]))
            lines.append(Line(f"{title}: vLLM / Orca (Oracle)", rates[PAGED] / rates[ORACLE], paper))
            charts[f"fig3.16_{title[0]}"] = _curves(results, tasks, f"Translation, {title}")
        return Report(self.name, "a shared prefix, LLaMA-13B, translation", lines, charts)


class Chat:
    """Long prompts, for which buddy allocation always reserves the rest of the model's length."""

    name = "fig3.17"

    @staticmethod
    def _of() -> dict[str, KneeOf]:
        return {system: _knee(system, OPT_13B, CHAT, 0.8, 400) for system in (PAGED, *reversed(ORCAS))}

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return list(self._of().values())

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        tasks = self._of()
        rates = {system: results[task].rate for system, task in tasks.items()}
        lines = [Line("vLLM, requests/s", rates[PAGED])]
        lines += [Line(f"vLLM / {system}", rates[PAGED] / rates[system], 2.0) for system in ORCAS]
        return Report(self.name, "chat, OPT-13B", lines, {"fig3.17": _curves(results, tasks, "Chat, OPT-13B")})

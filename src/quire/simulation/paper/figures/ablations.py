"""Figures 3.18b and 3.19: the size of a block, and how a preempted request gets its blocks back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine_core.executor.modelled import StepWork
from quire.simulation.charts.line_chart import Line as Curve
from quire.simulation.charts.line_chart import line_chart
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.experiment import Case
from quire.simulation.paper.lab import RunAt, Task
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import OPT_13B, PAGED, deploy_system
from quire.simulation.paper.workloads import ALPACA, SHAREGPT, Workload

# tokens of a request that lost its blocks, in the micro-benchmark
_LOST_TOKENS = 1024


class BlockSizes:
    """What large blocks waste. How fast a kernel reads small ones is not modelled (benchmarks/block_size.py)."""

    name = "fig3.18"
    _SIZES = (8, 16, 32, 64, 128, 256)

    @staticmethod
    def _run(dataset: Workload, block_size: int) -> RunAt:
        rate, num_requests = (1.8, 900) if dataset is SHAREGPT else (28.0, 3000)
        return RunAt(Case(PAGED, OPT_13B, dataset, (("block_size", block_size),)), rate, num_requests, drains=True)

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [self._run(dataset, size) for dataset in (SHAREGPT, ALPACA) for size in self._SIZES]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines, curves = [], []
        # 3.7.2: ShareGPT best from 16 to 128; Alpaca well with 16 and 32, and much worse beyond
        papers = {SHAREGPT: (128, 1.1), ALPACA: (32, 1.1)}
        for dataset, (largest_good, bound) in papers.items():
            latency = {size: results[self._run(dataset, size)].normalized_latency for size in self._SIZES}
            for size in self._SIZES:
                paper = (0.0, bound) if 16 <= size <= largest_good else None
                if dataset is ALPACA and size > largest_good:
                    paper = (bound, 100.0)
                lines.append(
                    Line(
                        f"{dataset.name}: blocks of {size}, latency of that with 16", latency[size] / latency[16], paper
                    )
                )
            curves.append(Curve(dataset.name, [(float(size), latency[size]) for size in self._SIZES]))
        chart = line_chart(
            "Latency by block size, OPT-13B", "tokens in a block", "seconds a token", curves, log_x=True, log_y=True
        )
        return Report(self.name, "block sizes, OPT-13B", lines, {"fig3.18b": chart})


class Recoveries:
    """(a) what bringing back 1,024 tokens takes, in each way; (b) latency when requests are preempted."""

    name = "fig3.19"
    _SIZES = (1, 4, 16, 64, 256)
    _MODES = ("recompute", "swap")

    @staticmethod
    def _run(mode: str, block_size: int) -> RunAt:
        options = (("block_size", block_size), ("preemption_mode", mode), ("swap_space", 8.0))
        return RunAt(Case(PAGED, OPT_13B, SHAREGPT, options), 2.0, 900, drains=True)

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [self._run(mode, size) for mode in self._MODES for size in (16, 64)]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        lines, swapping, computing = [], [], []
        for size in self._SIZES:
            deployment = deploy_system(PAGED, OPT_13B, assumed, {"block_size": size})
            swap = 2 * _LOST_TOKENS / size * deployment.swap_seconds_per_block
            work = StepWork(
                num_rows=1, num_tokens=_LOST_TOKENS, num_sampled=1, attention_pairs=_LOST_TOKENS**2 / 2 * 40
            )
            again = float(deployment.costs.seconds(work))
            swapping.append((float(size), 1e3 * swap))
            computing.append((float(size), 1e3 * again))
            # 3.7.3: recomputation is never dearer than 1.2 x swapping; swapping suffers from small blocks
            lines.append(Line(f"blocks of {size}: recomputation / swapping", again / swap, (0.0, 1.2)))
        for size in (16, 64):
            latency = [results[self._run(mode, size)].normalized_latency for mode in self._MODES]
            lines.append(Line(f"blocks of {size}: latency, recomputation / swapping", latency[0] / latency[1], 1.0))
        curves = [Curve("swapping", swapping), Curve("recomputation", computing)]
        chart = line_chart(
            "Bringing back 1,024 tokens, OPT-13B", "tokens in a block", "milliseconds", curves, log_x=True, log_y=True
        )
        return Report(self.name, "recomputation and swapping, OPT-13B", lines, {"fig3.19": chart})

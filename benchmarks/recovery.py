"""Which way of recovery serves better (figure 3.19b), and does `auto` find it? On a virtual clock, in minutes.

    python benchmarks/recovery.py [--quick] [--only PART_OF_NAME] [--plot FILE.svg]

Each workload needs more KV cache than there is and runs three times through the real scheduler and KV cache manager:
preempted requests are always computed again, always swapped, or as the engine's estimate says. Steps take what the
prices in recovery_workloads.py say: those of this machine, and those behind the paper's figure. Every slot that a step
reads is checked. Time is the clock's: until the last request has ended, and the mean over requests of
latency / output tokens (3.6.1). "Recovery" is what preempted tokens and blocks took of it. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from recovery_workloads import VOCAB, Workload, named, workloads

from quire.messages import split_sequence_id
from quire.simulation.charts.bar_chart import Panel, bar_charts
from quire.testing.core import CoreUnderTest

MODES = ("recompute", "swap", "auto")
WITHIN_PERCENT = 5.0
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half of the requests and of the KV cache")
    parser.add_argument("--only", default="", help="workloads whose machine and name contain this")
    parser.add_argument("--plot", type=Path, help="write the figure to this file, as SVG")
    arguments = parser.parse_args()
    chosen = named(workloads(0.5 if arguments.quick else 1.0), arguments.only)
    print(
        f"{'':<44}{'mode':<11}{'makespan':>10}{'s/token':>9}{'preempted':>11}{'recomputed':>12}{'swapped':>9}{'recovery':>10}"
    )
    results = [measure(workload) for workload in chosen]
    num_within = sum(
        result["auto_percent"] <= WITHIN_PERCENT and result["modes"]["auto"]["preemptions"] > 0 for result in results
    )
    print(f"auto within {WITHIN_PERCENT:g} % of the better one: {num_within} of {len(results)} workloads")
    if arguments.plot:
        arguments.plot.write_text(plot(results), encoding="utf-8")
    print(json.dumps({"recovery": results, "quick": arguments.quick, "num_within": num_within}))


def measure(workload: Workload) -> Row:
    """All three modes, and how far auto is from the better of the other two."""
    runs: dict[str, Row] = {}
    title = f"{workload.machine.name}: {workload.name}"
    for mode in MODES:
        runs[mode] = row = run(workload, mode)
        print(
            f"{title:<44}{mode:<11}{row['makespan']:>8.1f} s{row['normalised_latency']:>9.3f}{row['preemptions']:>11,}"
            f"{row['recomputed_tokens']:>12,}{row['swapped_blocks']:>9,}{row['recovery_seconds']:>8.2f} s",
            flush=True,
        )
        title = ""
    winner = min(MODES[:2], key=lambda mode: runs[mode]["makespan"])
    percent = {
        key: 100 * (runs["auto"][key] / min(runs[mode][key] for mode in MODES[:2]) - 1)
        for key in ("makespan", "normalised_latency")
    }
    loser = max(runs[mode]["makespan"] for mode in MODES[:2])
    lead = 100 * (loser / runs[winner]["makespan"] - 1)
    print(
        f"{'':<44}{winner} is better by {lead:.1f} %; auto {percent['makespan']:+.1f} % of it, "
        f"normalised latency {percent['normalised_latency']:+.1f} %",
        flush=True,
    )
    return {
        "machine": workload.machine.name,
        "workload": workload.name,
        "better": winner,
        "better_by_percent": round(lead, 2),
        "auto_percent": round(percent["makespan"], 2),
        "auto_latency_percent": round(percent["normalised_latency"], 2),
        "modes": runs,
    }


def run(workload: Workload, mode: str) -> Row:
    """Every request to its end."""
    core = _core(workload, mode)
    arrivals = workload.arrivals()
    arrival_of = {request.request_id: moment for moment, request in arrivals}
    length_of = {request.request_id: request.sampling.max_tokens or 1 for _, request in arrivals}
    ended_at: dict[int, float] = {}
    waiting = arrivals[::-1]
    while waiting or core.core.has_work:
        if not core.core.has_work:
            core.clock.advance(max(0.0, waiting[-1][0] - core.clock.now()))
        while waiting and waiting[-1][0] <= core.clock.now():
            core.core.add(waiting.pop()[1])
        for end in core.core.step().ends:
            assert end.error is None, end.error
            ended_at[split_sequence_id(end.sequence_id)[0]] = core.clock.now()
    assert len(ended_at) == len(arrivals)
    latencies = [(ended_at[number] - arrival_of[number]) / length_of[number] for number in ended_at]
    return _row(core, latencies)


def _core(workload: Workload, mode: str) -> CoreUnderTest:
    machine = workload.machine
    return CoreUnderTest(
        num_blocks=workload.num_blocks,
        block_size=workload.block_size,
        budget=machine.budget,
        max_num_seqs=256,
        max_model_len=machine.max_model_len,
        prefix_caching=workload.prefix_caching,
        num_host_blocks=workload.num_host_blocks,
        preemption_mode=mode,
        costs=machine.costs(workload.block_size),
        vocab_size=VOCAB,
        check_invariants=False,
    )


def _row(core: CoreUnderTest, latencies: list[float]) -> Row:
    counted, costs, work = core.core.statistics(), core.executor.costs, core.executor.work
    assert counted["num_requests_running"] == counted["num_requests_waiting"] == 0
    num_moved = work.num_swapped_out_blocks + work.num_swapped_in_blocks
    recomputed = int(counted["recomputed_tokens_total"])
    return {
        "makespan": round(core.clock.now(), 3),
        "normalised_latency": round(statistics.mean(latencies), 5),
        "preemptions": int(counted["num_preemptions_total"]),
        "by_swap": int(counted["num_preemptions_by_swap_total"]),
        "recomputed_tokens": recomputed,
        "swapped_blocks": num_moved,
        "swapped_in_blocks": work.num_swapped_in_blocks,
        "recovery_seconds": round(recomputed * costs.per_token + num_moved * costs.per_swapped_block, 3),
        "steps": work.num_steps,
    }


def plot(results: list[Row]) -> str:
    """Seconds until the last request has ended, and what recovery took of them."""
    panels = [
        Panel(
            f"{result['machine']}: {result['workload']}",
            list(MODES),
            {
                "makespan": [result["modes"][mode]["makespan"] for mode in MODES],
                "of it recovery": [result["modes"][mode]["recovery_seconds"] for mode in MODES],
            },
        )
        for result in results
    ]
    return bar_charts("Recovery on the virtual clock, in seconds (figure 3.19b)", panels, columns=3)


if __name__ == "__main__":
    main()

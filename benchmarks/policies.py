"""How long requests wait under each scheduling policy, on six traces, on a virtual clock.

    python benchmarks/policies.py [--azure FILE.csv] [--mooncake FILE.jsonl] [--quick] [--only PART] [--plot FOLDER]

Real scheduler and KV cache manager; steps take what `quire simulate` says of an H100, so that all figures but the time
of a decision are the same in every run. The traces: a prompt of 100,000 tokens ahead of short ones (4.5.1); ShareGPT's
lengths near capacity; a stream of short prompts that fills every step, with a few long ones near its beginning; chats
that share prefixes in a cache that is too small; Azure's and Mooncake's conversations as they were published, or
lengths drawn from them where no file is given. Then the stream at several lengths: whose worst wait grows with it?
With what staging size? What does a better mean cost the worst wait? And ShareGPT with one urgent request in ten. Ends
in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policy_runs import POLICIES, Outcome, capacity, run
from policy_traces import (
    LONG,
    NUM_LONG,
    SHORT,
    STEP_FILLING,
    Trace,
    azure,
    chats,
    long_ahead,
    mooncake,
    sharegpt,
    stream,
)  # fmt: skip

from quire.simulation.charts.bar_chart import Panel, bar_charts
from quire.simulation.charts.line_chart import Line, line_chart
from quire.testing.waiting_bound import steps_to_first_token

LOAD = 0.95
STREAMS = (10.0, 20.0, 40.0)
LONGER_STREAMS = (10.0, 20.0, 40.0, 80.0, 160.0)
BOUND = "two_level, bound"
URGENT_SHARE = 0.1
STAGING_SIZES = (1, 8, 32, 128)
OVERTAKING = (0.25, 0.5, 0.7, 1.0, 2.0)
TRACES = ("long ahead", "sharegpt", "stream", "chats", "azure", "mooncake")
FULL_STREAM = "starvation, prompts that fill a step"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", default="", metavar="FILE", help="Azure's trace of conversations (.csv)")
    parser.add_argument("--mooncake", default="", metavar="FILE", help="Mooncake's trace of conversations (.jsonl)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--plot", type=Path, help="write policies.svg and policies_starvation.svg to this folder")
    arguments = parser.parse_args()
    size = 4 if arguments.quick else 1
    fewer = slice(2 if arguments.quick else None)
    rate = LOAD * capacity(lambda rate: sharegpt(2000 // size, rate))
    print(f"ShareGPT: {rate:.2f} requests a second, {LOAD:g} of what FIFO can serve")
    parts: dict[str, Callable[[], Any]] = {
        "long ahead": lambda: compare(long_ahead()),
        "sharegpt": lambda: compare(sharegpt(3000 // size, rate)),
        "stream": lambda: compare(stream(20.0 / size)),
        "chats": lambda: compare(chats(8 // size)),
        "azure": lambda: compare(near_capacity(azure, 3000 // size, arguments.azure)),
        "mooncake": lambda: compare(near_capacity(mooncake, 800 // size, arguments.mooncake)),
        "starvation": lambda: starvation(STREAMS[fewer], SHORT),
        FULL_STREAM: lambda: starvation(LONGER_STREAMS[fewer], STEP_FILLING),
        "staging size": lambda: staging([sharegpt(3000 // size, rate), stream(20.0 / size), chats(8 // size)]),
        "edge": lambda: edge(stream(10.0 / size)),
        "urgent": lambda: urgent(sharegpt(3000 // size, rate, urgent_share=URGENT_SHARE)),
    }
    results = {name: part() for name, part in parts.items() if arguments.only in name}
    accepted = acceptance(results)
    for claim, holds in accepted.items():
        print(f"{'yes' if holds else 'NO':<5}{claim}")
    if arguments.plot:
        write_plots(arguments.plot, results)
    print(json.dumps({"policies": results, "accepted": accepted, "quick": arguments.quick}))


# ---------------------------------------------------------------------------------------------- parts


def near_capacity(make: Callable[[int, float, str], Trace], num_requests: int, file: str) -> Trace:
    """So many requests of a trace, at a share of what FIFO can serve."""
    return make(num_requests, LOAD * capacity(lambda rate: make(num_requests, rate, file)), file)


def compare(trace: Trace) -> dict[str, Row]:
    """One trace under every policy."""
    print(f"\n{trace.name}: budget {trace.engine.budget:,}, {trace.engine.num_slots:,} slots")
    print(f"{'':<22}{'TTFT mean':>12}{'p99':>10}{'worst':>10}{'hits':>9}{'s/token':>10}{'decision':>11}{'p99':>9}")
    rows = {}
    for policy in POLICIES:
        rows[policy] = row = run(trace, policy).row()
        print(
            f"{policy:<22}{row['ttft_mean']:>10.3f} s{row['ttft_p99']:>8.3f} s{row['ttft_worst']:>8.3f} s"
            f"{row['hit_rate']:>9.1%}{row['normalised_latency']:>10.5f}{row['schedule_us_median']:>8.0f} us"
            f"{row['schedule_us_p99']:>6.0f} us",
            flush=True,
        )
    return rows


def starvation(lengths: tuple[float, ...], short: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Steps until the slowest of the long prompts has its first token, by the length of the stream."""
    print(f"\nshort prompts of {short[0]:,} to {short[1]:,}: steps to the first token of the slowest long prompt")
    print(f"{'seconds of the stream':<22}" + "".join(f"{seconds:>9g}" for seconds in lengths))
    worst: dict[str, dict[str, float]] = {policy: {} for policy in [*POLICIES, BOUND]}
    for seconds in lengths:
        trace = stream(seconds, short)
        for policy in POLICIES:
            outcome = run(trace, policy)
            waits = {number: outcome.seen[number].num_steps_to_first for number in range(NUM_LONG)}
            worst[policy][f"{seconds:g}"] = max(waits.values())
            if policy == "two_level":
                bounds = {number: bound_of(outcome, trace, number) for number in waits}
                assert all(waits[number] <= bounds[number] for number in waits), "a request waited beyond the bound"
                worst[BOUND][f"{seconds:g}"] = max(bounds.values())
    for policy, by_length in worst.items():
        print(f"{policy:<22}" + "".join(f"{steps:>9,.0f}" for steps in by_length.values()))
    return worst


def bound_of(outcome: Outcome, trace: Trace, number: int) -> int:
    """From what was there when the request came: nothing that comes after its batch matters."""
    mine = outcome.seen[number]
    ahead = [
        len(other.request.prompt_token_ids)
        for other in outcome.seen.values()
        if other.place < mine.place and other.first_token_step > mine.arrival_step
    ]
    return steps_to_first_token(
        len(mine.request.prompt_token_ids),
        ahead,
        budget=trace.engine.budget,
        num_rows=trace.engine.max_num_seqs,
        longest_after=LONG,
    )


def staging(traces: list[Trace]) -> dict[str, Any]:
    """What the size of a batch changes: the mean against the worst wait."""
    print(f"\n{'two_level, TTFT mean and worst':<36}" + "".join(f"{size:>18}" for size in STAGING_SIZES))
    rows: dict[str, Any] = {}
    for trace in traces:
        found = {size: run(trace, "two_level", staging_size=size).row() for size in STAGING_SIZES}
        rows[trace.name] = {
            size: {name: row[name] for name in ("ttft_mean", "ttft_worst")} for size, row in found.items()
        }
        columns = (f"{row['ttft_mean']:>8.3f}{row['ttft_worst']:>8.3f} s" for row in found.values())
        print(f"{trace.name:<36}" + "".join(columns), flush=True)
    return rows


def edge(trace: Trace) -> dict[str, Any]:
    """What the mean costs the worst wait: shares of the line that may overtake its first one, between FIFO and SRTF."""
    print(f"\n{trace.name}: TTFT mean and worst; bounded_srtf by its share")
    found = {"fifo": run(trace, "fifo").row()}
    found |= {f"{share:g}": run(trace, "bounded_srtf", overtaking=share).row() for share in OVERTAKING}
    found["srtf"] = run(trace, "srtf").row()
    for name, row in found.items():
        print(f"{name:<22}{row['ttft_mean']:>10.3f}{row['ttft_worst']:>8.3f} s", flush=True)
    return {name: {key: row[key] for key in ("ttft_mean", "ttft_worst")} for name, row in found.items()}


def urgent(trace: Trace) -> dict[str, Row]:
    """One in ten is more important: what do these wait, and the others?"""
    print(
        f"\n{trace.name}, {URGENT_SHARE:.0%} of the requests of priority -1: TTFT mean and p99 of those, of the others"
    )
    rows: dict[str, Row] = {}
    for policy in POLICIES:
        outcome = run(trace, policy)
        row: Row = {}
        for name, priority in (("urgent", -1), ("others", 0)):
            times = outcome.ttfts(priority)
            row[f"{name}_mean"], row[f"{name}_p99"] = statistics.mean(times), statistics.quantiles(times, n=100)[-1]
        row["preemptions"] = outcome.num_preemptions
        rows[policy] = row
        print(f"{policy:<22}" + "".join(f"{row[name]:>10.3f} s" for name in row if name != "preemptions"), flush=True)
    return rows


# ---------------------------------------------------------------------------------------------- what it says


def acceptance(results: dict[str, Any]) -> dict[str, bool]:
    """The claims that the measured parts can decide."""
    traces = {name: results[name] for name in TRACES if name in results}
    claims = {}
    for name, rows in traces.items():
        mine, fifo = rows["two_level"], rows["fifo"]
        claims[f"{name}: mean TTFT of two_level no worse than FIFO's"] = mine["ttft_mean"] <= fifo["ttft_mean"]
        claims[f"{name}: hit rate of two_level no lower than FIFO's"] = mine["hit_rate"] >= fifo["hit_rate"]
        bounded, shortest = rows["bounded_srtf"], rows["srtf"]
        claims[f"{name}: mean TTFT of bounded_srtf within 5 % of SRTF's"] = (
            bounded["ttft_mean"] <= 1.05 * shortest["ttft_mean"]
        )
        claims[f"{name}: worst TTFT of bounded_srtf within 1.5 times FIFO's"] = (
            bounded["ttft_worst"] <= 1.5 * fifo["ttft_worst"]
        )
        if name == "long ahead":
            claims[f"{name}: at most half of FIFO's"] = mine["ttft_mean"] <= fifo["ttft_mean"] / 2
    for name, worst in results.items():
        if not name.startswith("starvation"):
            continue
        first, *_, last = worst[BOUND]
        claims[f"{name}: two_level stays within its bound"] = all(
            worst["two_level"][length] <= most for length, most in worst[BOUND].items()
        )
        growth = {policy: worst[policy][last] / worst[policy][first] for policy in ("srtf", "two_level")}
        claims[f"{name}: two_level's wait does not grow with the stream"] = growth["two_level"] < 1.2
        claims[f"{name}: SRTF's does"] = growth["srtf"] > 1.5
    return claims


def write_plots(folder: Path, results: dict[str, Any]) -> None:
    # priority is the same as FIFO where all have one priority
    shown = ("fifo", "srtf", "two_level", "bounded_srtf")
    panels = [
        Panel(
            name,
            list(shown),
            {
                "mean": [results[name][policy]["ttft_mean"] for policy in shown],
                "99th percentile": [results[name][policy]["ttft_p99"] for policy in shown],
            },
        )
        for name in TRACES
        if name in results
    ]
    if panels:
        text = bar_charts("Time to first token, in seconds of the virtual clock", panels)
        (folder / "policies.svg").write_text(text, encoding="utf-8")
    if FULL_STREAM in results:
        lines = [
            Line(policy, [(float(length), steps) for length, steps in by_length.items()])
            for policy, by_length in results[FULL_STREAM].items()
            if policy in (*shown, BOUND)
        ]
        text = line_chart(
            "Worst wait of a long prompt", "seconds that short prompts keep coming", "steps to its first token", lines,
            log_x=True, log_y=True,
        )  # fmt: skip
        (folder / "policies_starvation.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

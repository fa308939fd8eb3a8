"""The goals of the project beside what was measured, as the table of docs/benchmarks.md ("Goals and rivals").

Figures come from the files that `rivals.py` and `quire bench WORKLOAD --json FILE` write, and from what
`engine_overhead.py` and `streams.py` print. What is in none of them stays a dash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rival_engines import ENGINES
from rival_report import ratios, short, values
from rival_workloads import PARTS, Sizes, jobs

from quire.config.arithmetic import ModelShape
from quire.interfaces.cli.bench_limits import ModelCost, least_seconds, unit_of

_RIVALS = "`python benchmarks/rivals.py`"


@dataclass
class Files:
    """What was measured, by where it came from."""

    rivals: list[dict[str, Any]]
    # workload -> result of `quire bench`
    bench: dict[str, dict[str, Any]]
    overhead: dict[str, Any] | None = None
    streams: dict[str, Any] | None = None
    # of `rivals.py --experts`
    experts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, paths: list[Path]) -> Files:
        files = cls([], {})
        for path in paths:
            # scripts end in one line of JSON, after their tables
            text = path.read_text(encoding="utf-8").strip()
            found = json.loads(text) if text.startswith("{") else json.loads(text.splitlines()[-1])
            if "units" in found:
                has_experts = "num_experts" in found["settings"].get("config", {})
                (files.experts if has_experts else files.rivals).append(found)
            elif "workload" in found:
                files.bench[f"{found['workload']} {found['model']}"] = found
            elif "steady_decode_us" in found:
                files.overhead = found
            elif found.get("benchmark") == "streams":
                files.streams = found
            else:
                raise SystemExit(f"{path}: none of the files that this table is made of")
        return files


@dataclass(frozen=True)
class Row:
    """One goal."""

    name: str
    goal: str
    rival: str
    command: str
    measured: Callable[[Files], tuple[str, str] | None]


def table(files: Files) -> str:
    """Markdown: the goals; a ratio is how many times better than the rival, from the same rounds. Then every class of
    work beside every rival."""
    lines = [
        "| | goal | measured | rival | ratio | command | date | machine |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    date, machine = _when(files)
    for row in _rows():
        found = row.measured(files)
        measured, ratio = found if found else ("–", "–")
        when = f"{date} | {machine}" if found else "– | –"
        lines.append(f"| {row.name} | {row.goal} | {measured} | {row.rival} | {ratio} | {row.command} | {when} |")
    return "\n".join([*lines, "", *_classes(files)])


def _classes(files: Files) -> Iterator[str]:
    rivals = [engine.name for engine in ENGINES if engine.name != "quire"]
    rivals = [name for name in rivals if any(_all_ratios(files, *kind, name) for kind in _kinds())]
    yield f"| Quire is so many times better | {' | '.join(rivals)} |"
    yield "| --- " * (len(rivals) + 1) + "|"
    for precision, key in _kinds():
        cells = [_ratio_in_words(_all_ratios(files, precision, key, name)) for name in rivals]
        if any(cell != "–" for cell in cells):
            yield f"| {PARTS[key].title}, {precision} | {' | '.join(cells)} |"


def _kinds() -> Iterator[tuple[str, str]]:
    for key in PARTS:
        for precision in ("bf16", "int8", "int4"):
            yield precision, key


def _all_ratios(files: Files, precision: str, key: str, rival: str) -> list[float]:
    return [ratio for saved in files.rivals for ratio in ratios(saved, precision, rival, key)]


def _ratio_in_words(better: list[float]) -> str:
    return f"{median(better):.2f} x ({min(better):.2f} to {max(better):.2f})" if better else "–"


def _rows() -> Iterator[Row]:
    for name, precision, goal, rival, key in (
        ("W1 bf16", "bf16", "0.92 of the read bandwidth; 1.05 x", "ik_llama.cpp", "W1"),
        ("W1 int8", "int8", "0.90; 1.05 x", "ik_llama.cpp", "W1"),
        ("W1 4-bit", "int4", "0.80; 1.13 x", "ik_llama.cpp", "W1"),
        ("W2 bf16", "bf16", "0.85 of the limit; 1.3 x", "openvino", "W2"),
        ("W2 int8", "int8", "0.75; 1.3 x", "openvino", "W2"),
        ("W3", "bf16", "1.5 x", "vllm-zentorch", "W3"),
        ("W4, 8 answers", "bf16", "1.6 x", "openvino", "W4 n"),
        ("W4, 4 beams", "bf16", "2.5 x", "openvino", "W4 beam"),
        ("W5 bf16", "bf16", "0.88 of the peak; 1.13 x", "openvino", "W5"),
        ("W5 int8", "int8", "0.68", "openvino", "W5"),
    ):
        yield Row(name, goal, rival, _RIVALS, _from_rivals(precision, rival, key))
    for rival in ("llama.cpp", "ik_llama.cpp"):
        measured = _from_rivals("bf16", rival, "W1", of_experts=True)
        goal, command = "0.80 of the bytes of the experts that are asked; 1.5 x", f"{_RIVALS[:-1]} --experts 64`"
        yield Row("W1 of experts, bf16", goal, rival, command, measured)
    yield Row(
        "W6", "p99 between tokens within 2 x p50 at 0.8 of capacity", "", "`quire bench serve MODEL`", _server_spread
    )
    yield Row("W7 embedded", "2 s", "", "`quire bench start`", _start("embedded", "further starts"))
    yield Row("W7 0.6B, warm", "2 s", "", "`quire bench start MODEL`", _start("", "further starts"))
    yield Row("W7 0.6B, cold", "5 s", "", "`quire bench start MODEL`", _start("", "first start, from the disk"))
    yield Row("W7 import quire", "0.25 s", "", "`quire bench start`", _start("embedded", "import quire"))
    command = "`python benchmarks/engine_overhead.py`"
    for count, goal in ((256, 100), (1024, 300)):
        yield Row(f"W8 {count:,} sequences", f"{goal} µs", "", command, _overhead("steady_decode_us", count))
    for count, goal in ((256, 900), (1024, 4000)):
        name = f"W8 {count:,} sequences, a tenth comes and goes"
        yield Row(name, f"{goal:,} µs", "", command, _overhead("turnover_us", count))
    yield Row("W9", "60,000 tokens/s", "vllm's server", "`python benchmarks/streams.py`", _streams)


def _from_rivals(
    precision: str, rival: str, key: str, *, of_experts: bool = False
) -> Callable[[Files], tuple[str, str] | None]:
    def measured(files: Files) -> tuple[str, str] | None:
        # of several runs the one with most rounds beside this rival, else any
        runs = files.experts if of_experts else files.rivals
        measured_in = [saved for saved in runs if values(saved, precision, "quire", key)]
        if not measured_in:
            return None
        saved = max(measured_in, key=lambda saved: len(ratios(saved, precision, rival, key)))
        figure = median(values(saved, precision, "quire", key))
        better = ratios(saved, precision, rival, key)
        unit = PARTS[key].unit
        if key == "W2":
            unit += f" with {saved['settings']['sizes']['num_requests']} requests"
        return f"{short(figure)} {unit}{_share(saved, precision, key, figure)}", _ratio_in_words(better)

    return measured


def _share(saved: dict[str, Any], precision: str, key: str, figure: float) -> str:
    """Of the limit that was measured in the same rounds: the bandwidth as it was then, the best rate of arithmetic."""
    limits = saved["limits"]
    if not limits or key not in ("W1", "W2", "W5"):
        return ""
    weight_bytes = saved["settings"]["weight_bytes"][precision]
    if key == "W1":
        pairs = [
            (unit["figures"]["quire"][key] * weight_bytes / 1e9, unit.get("limits", limits)["read_gb_s"])
            for unit in saved["units"]
            if unit["precision"] == precision and key in unit["figures"].get("quire", {})
        ]
        share, rate = median(read / limit for read, limit in pairs), median(limit for _, limit in pairs)
        return f", {share:.2f} of {rate:.1f} GB/s"
    cost = ModelCost(ModelShape.of(saved["settings"]["config"]), weight_bytes, unit_of("bfloat16", precision))
    sizes = Sizes(**saved["settings"]["sizes"])
    peak = limits.get(f"{cost.unit}_gops")
    if key == "W2":
        [job] = jobs("W2", sizes, 0)
        least = least_seconds(job.work, cost, limits["read_gb_s"] * 1e9, peak * 1e9) if peak else None
        return f", {figure * least / job.work.num_output_tokens:.2f} of the limit" if least else ""
    length = sizes.prompt
    return f", {cost.prompt_operations(length) * figure / length / 1e9 / peak:.2f} of {peak:.0f} GOP/s" if peak else ""


def _server_spread(files: Files) -> tuple[str, str] | None:
    for key, found in files.bench.items():
        measures = found["measures"]
        if key.startswith("W6") and "0.8x between tokens p99" in measures:
            p50, p99 = (measures[f"0.8x between tokens p{share}"]["median"] for share in (50, 99))
            return f"{p99 / p50:.1f} x ({p50:.0f} and {p99:.0f} ms)", "–"
    return None


def _start(model: str, measure: str) -> Callable[[Files], tuple[str, str] | None]:
    def measured(files: Files) -> tuple[str, str] | None:
        for found in files.bench.values():
            is_embedded = found["model"] == "embedded"
            if found["workload"] == "W7" and is_embedded == bool(model):
                one = found["measures"][measure]
                return f"{one['median']:.2f} s ({one['q1']:.2f} to {one['q3']:.2f})", "–"
        return None

    return measured


def _overhead(situation: str, count: int) -> Callable[[Files], tuple[str, str] | None]:
    def measured(files: Files) -> tuple[str, str] | None:
        found = files.overhead.get(situation, {}).get(str(count)) if files.overhead else None
        return (f"{found:,.0f} µs", "–") if found else None

    return measured


def _streams(files: Files) -> tuple[str, str] | None:
    """Ours at the highest rate; beside the rival at the lowest, which it can follow."""
    if files.streams is None:
        return None
    rates = files.streams["rates"]
    lowest, highest = min(rates, key=int), max(rates, key=int)
    seen = [figures for figures in rates[highest]["quire"] if figures]
    if not seen:
        return None
    rate, share, events, whole = (
        median(figures[name] for figures in seen)
        for name in ("tokens/s", "share of a core", "events/token", "tokens/s of a whole core")
    )
    measured = f"{rate:,.0f} in {share:.2f} of a core, {events:.2f} events a token; {whole:,.0f} of a whole core"
    key = "us of processor/token"
    rounds = zip(rates[lowest]["quire"], rates[lowest].get("vllm", []), strict=False)
    better = [theirs[key] / ours[key] for ours, theirs in rounds if ours and theirs]
    if not better:
        return measured, "–"
    low, high = min(better), max(better)
    return measured, f"{median(better):.2f} x ({low:.2f} to {high:.2f}) less processor at {int(lowest):,} tokens/s"


def _when(files: Files) -> tuple[str, str]:
    for found in [saved["settings"] for saved in files.rivals] + list(files.bench.values()):
        if "machine" in found:
            return found.get("date", "–"), found["machine"]
    return "–", "–"

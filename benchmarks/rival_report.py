"""Tables, ratios and a drawing of what rivals.py measured."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from rival_engines import ENGINES
from rival_workloads import PARTS, Part

from quire.simulation.charts.bar_chart import Panel, bar_charts

_PRECISIONS = ("bf16", "int8", "int4", "float32")
# under bars there is little room
_SHORT_NAMES = {"transformers": "HF", "ik_llama.cpp": "ik", "vllm-zentorch": "vLLM+zen", "vllm": "vLLM"}
Saved = dict[str, Any]


def values(saved: Saved, precision: str, engine: str, key: str) -> list[float]:
    """One figure, once a round and pod."""
    return [
        unit["figures"][engine][key]
        for unit in saved["units"]
        if unit["precision"] == precision and key in unit["figures"].get(engine, {})
    ]


def ratios(saved: Saved, precision: str, engine: str, key: str) -> list[float]:
    """How many times better Quire was in the same round, next to it."""
    part, found = PARTS[key], []
    for unit in saved["units"]:
        ours, theirs = unit["figures"].get("quire", {}), unit["figures"].get(engine, {})
        if unit["precision"] == precision and key in ours and key in theirs:
            found.append(theirs[key] / ours[key] if part.is_time else ours[key] / theirs[key])
    return found


def report(saved: Saved) -> str:
    """Markdown: a table for each precision, engines as rows, figures as columns."""
    settings = saved["settings"]
    lines = [
        f"{settings.get('machine', 'a machine that was not noted')}; {settings.get('date', 'no date')}.",
        "",
        "Medians (lowest to highest; rounds). In bold how many times better Quire was in the same rounds, and the",
        "lowest and highest of that.",
    ]
    for precision in _PRECISIONS:
        parts = [part for part in PARTS.values() if any(values(saved, precision, e.name, part.key) for e in ENGINES)]
        if parts:
            titles = [f"{part.title}, {part.unit}" for part in parts]
            lines += ["", f"| {precision} | {' | '.join(titles)} |", "| --- " * (len(parts) + 1) + "|"]
            lines += _rows(saved, precision, parts)
    if saved["limits"]:
        limits = ", ".join(f"{name} {value}" for name, value in saved["limits"].items())
        lines += ["", f"Limits of the machine, the best of what was measured between the rounds: {limits}."]
    lines.append("")
    for label, facts in saved["facts"].items():
        lines.append(f"- {label}: {facts['version']}, ready after {facts['ready']:.1f} s, {facts['memory_mb']:,} MB")
    lines += [f"- {note}" for note in saved["notes"]]
    return "\n".join(lines)


def _rows(saved: Saved, precision: str, parts: list[Part]) -> Iterator[str]:
    for engine in ENGINES:
        cells = [_cell(saved, precision, engine.name, part.key) for part in parts]
        if any(cells):
            yield f"| {engine.name} | {' | '.join(cells)} |"


def _cell(saved: Saved, precision: str, engine: str, key: str) -> str:
    found = values(saved, precision, engine, key)
    if not found:
        return ""
    text = f"{short(median(found))} ({short(min(found))} to {short(max(found))}; {len(found)})"
    better = ratios(saved, precision, engine, key) if engine != "quire" else []
    return f"{text} **{median(better):.2f} x** ({min(better):.2f} to {max(better):.2f})" if better else text


def short(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def drawing(saved: Saved) -> str | None:
    """Bars: one chart a figure, one group an engine."""
    panels = []
    for part in PARTS.values():
        series = {
            precision: [_median(values(saved, precision, engine.name, part.key)) for engine in ENGINES]
            for precision in ("bf16", "int8")
        }
        shown = [place for place in range(len(ENGINES)) if any(series[name][place] is not None for name in series)]
        if len(shown) > 1:
            names = [_SHORT_NAMES.get(ENGINES[place].name, ENGINES[place].name) for place in shown]
            picked = {name: [series[name][place] for place in shown] for name in series}
            panels.append(Panel(f"{part.title}, {part.unit}", names, picked))
    return bar_charts("Quire and its rivals", panels) if panels else None


def _median(found: list[float]) -> float | None:
    return median(found) if found else None

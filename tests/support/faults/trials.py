"""Faults that were done: one after the other, kept in a file that sums them up, shown as a table."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.support.faults.case import Case
from tests.support.faults.cases import CASES
from tests.support.faults.history import FAILED, FINISHED, REFUSED, History
from tests.support.faults.stage import Setting

# beside what a case's own waiting takes
_TRIAL_SECONDS = 300.0


@dataclass
class Trial:
    """One fault, done once. `load` is the machine's load average when it began; `heard`: how many requests ended in
    which way, and how many of them in a wrong one."""

    case: str
    setting: str
    figures: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    load: float = 0.0
    heard: dict[str, int] = field(default_factory=dict)


async def try_case(case: Case, setting: Setting) -> Trial:
    """Never raises: what went wrong stands in the trial."""
    setting = replace(setting, is_paced=case.is_paced(setting), histories=[])
    trial = Trial(case.id, _kind(case, setting), load=os.getloadavg()[0])
    began = time.monotonic()
    try:
        async with asyncio.timeout(_TRIAL_SECONDS + 2 * setting.slow_seconds):
            trial.figures = await case.run(setting)
        missed = [name for name, goal in case.goals.items() if trial.figures[name] > goal]
        if missed:
            trial.error = f"goal missed: {', '.join(missed)}"
    except Exception as error:
        trial.error = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])[:4000]
    trial.seconds = time.monotonic() - began
    trial.heard = _heard(setting.histories)
    return trial


def run(cases: Sequence[Case], setting: Setting, times: int | None, path: Path | None) -> list[Trial]:
    """Each as often as it says of itself, or so many times; those that the file knows count."""
    trials = read(path)
    for number in range(max((times or case.times for case in cases), default=0)):
        for case in cases:
            done = sum(trial.case == case.id and trial.setting == _kind(case, setting) for trial in trials)
            if done > number or number >= (times or case.times):
                continue
            trial = asyncio.run(try_case(case, setting))
            trials.append(trial)
            write(path, trials)
            said = (trial.error or "")[:400] or "; ".join(_figure(case, name, trial) for name in trial.figures)
            heard = ", ".join(f"{count} {end}" for end, count in trial.heard.items())
            print(f"{case.id:5}  {case.what:36} {trial.seconds:6.1f} s  {said or 'as it should be'}", flush=True)
            print(f"      on the {trial.setting} core: {heard or 'no streams'}", flush=True)
    return trials


def read(path: Path | None) -> list[Trial]:
    if path is None or not path.exists():
        return []
    return [Trial(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def write(path: Path | None, trials: list[Trial]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def table(trials: list[Trial]) -> str:
    """For people and for documents: a row a figure."""
    rows = [
        "| fault | | core | good | requests right, ended by the fault, wrong | figure | goal | median | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        mine = [trial for trial in trials if trial.case == case.id]
        if not mine:
            continue
        good = sum(trial.error is None for trial in mine)
        core = ", ".join(sorted({trial.setting for trial in mine}))
        head = f"| {case.id} | {case.what} | {core} | {good}/{len(mine)} | {_requests(mine)}"
        for name in sorted({name for trial in mine for name in trial.figures}) or [""]:
            rows.append(f"{head} | {_row(case, name, mine)} |")
    loads = [trial.load for trial in trials] or [0.0]
    took = sum(trial.seconds for trial in trials)
    return "\n".join(
        [*rows, "", f"{took:.0f} s in all; load of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}."]
    )


def _row(case: Case, name: str, mine: list[Trial]) -> str:
    values = [trial.figures[name] for trial in mine if name in trial.figures]
    what, unit = _named(name)
    goal = f"{case.goals[name]:g} {unit}" if name in case.goals else ""
    numbers = f"{_told(statistics.median(values))} {unit} | {_told(max(values))} {unit}" if values else " | "
    return f"{what} | {goal} | {numbers}"


def _figure(case: Case, name: str, trial: Trial) -> str:
    what, unit = _named(name)
    goal = f" (goal {case.goals[name]:g})" if name in case.goals else ""
    return f"{what} {_told(trial.figures[name])} {unit}{goal}"


_UNITS = ("times", "times as before", "requests", "results", "frames", "clients", "KiB")


def _named(name: str) -> tuple[str, str]:
    """A figure's name, and its unit."""
    what, _, unit = name.rpartition(", ")
    return (what, unit) if unit in _UNITS else (name, "s")


def _told(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def _requests(mine: list[Trial]) -> str:
    sums = [sum(trial.heard.get(name, 0) for trial in mine) for name in (FINISHED, FAILED, REFUSED, "wrong")]
    return f"{sums[0]}, {sums[1] + sums[2]}, {sums[3]}" if any(sums) else ""


def _heard(histories: list[History]) -> dict[str, int]:
    found: dict[str, int] = {}
    for history in histories:
        for end, count in (*history.counts().items(), ("wrong", len(history.mistakes()))):
            found[end] = found.get(end, 0) + count
    return found


def _kind(case: Case, setting: Setting) -> str:
    return "paced" if case.is_paced(setting) else "embedded"

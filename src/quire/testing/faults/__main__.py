"""Breaks a server in every way that is known, so many times each, and says what came of it.

    python -m quire.testing.faults                                 each fault once, 32 streams on the embedded model
    python -m quire.testing.faults --only F1,F3 --times 20 --out build/faults.json
    python -m quire.testing.faults --paced                         on a core without a model, which starts at once

With --out the results are added to the file, and what is there already is not done again: a run that was stopped goes
on, and several runs add up. Exit status 1: a goal was missed, or something happened that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quire.testing.faults.cases import CASES, Case
from quire.testing.faults.stage import Setting
from quire.testing.faults.start_up import START_UP_CASES

_TRIAL_SECONDS = 120.0
ALL_CASES = (*CASES, *START_UP_CASES)


@dataclass
class Trial:
    """One fault, done once. `load` is the machine's load average when it began."""

    case: str
    setting: str
    figures: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    load: float = 0.0


async def try_case(case: Case, setting: Setting) -> Trial:
    """Never raises: what went wrong stands in the trial."""
    trial = Trial(case.id, "paced" if setting.is_paced else "embedded", load=os.getloadavg()[0])
    began = time.monotonic()
    try:
        async with asyncio.timeout(_TRIAL_SECONDS):
            trial.figures = await case.run(setting)
        missed = [name for name, goal in case.goals.items() if trial.figures[name] > goal]
        if missed:
            trial.error = f"goal missed: {', '.join(missed)}"
    except Exception as error:
        trial.error = f"{type(error).__name__}: {error}"[:2000]
    trial.seconds = time.monotonic() - began
    return trial


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
    rows = ["| fault | | times | figure | goal | median | worst |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for case in ALL_CASES:
        mine = [trial for trial in trials if trial.case == case.id]
        if not mine:
            continue
        good = sum(trial.error is None for trial in mine)
        head = f"| {case.id} | {case.what} | {good}/{len(mine)}"
        names = sorted({name for trial in mine for name in trial.figures}) or [""]
        for name in names:
            values = [trial.figures[name] for trial in mine if name in trial.figures]
            goal = f"{case.goals[name]:g} s" if name in case.goals else ""
            numbers = f"{statistics.median(values):.2f} s | {max(values):.2f} s" if values else " | "
            rows.append(f"{head} | {name.replace('_', ' ')} | {goal} | {numbers} |")
    loads = [trial.load for trial in trials] or [0.0]
    return "\n".join([*rows, "", f"Load of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}."])


def run(cases: Sequence[Case], setting: Setting, times: int, path: Path | None) -> list[Trial]:
    trials = read(path)
    kind = "paced" if setting.is_paced else "embedded"
    for number in range(times):
        for case in cases:
            if sum(trial.case == case.id and trial.setting == kind for trial in trials) > number:
                continue
            trial = asyncio.run(try_case(case, setting))
            trials.append(trial)
            write(path, trials)
            figures = ", ".join(f"{name} {value:.2f}" for name, value in trial.figures.items())
            print(f"{case.id:5} {case.what:36} {trial.seconds:6.1f} s  {trial.error or figures}", flush=True)
    return trials


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="ids of faults, such as F1,F3")
    parser.add_argument("--times", type=int, default=1, help="how often each, those in the file included")
    parser.add_argument("--streams", type=int, default=32, help="live streams meanwhile")
    parser.add_argument("--stall-timeout", type=float, default=10.0, help="T of F3")
    parser.add_argument("--aborts", type=int, default=1000, help="requests of the storm F11")
    parser.add_argument("--paced", action="store_true", help="a core without a model")
    parser.add_argument("--out", type=Path, help="a file that sums up the results")
    options = parser.parse_args(arguments)
    known = {case.id: case for case in ALL_CASES}
    names = options.only.split(",") if options.only else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(known)}")
    setting = Setting(options.streams, options.paced, options.stall_timeout, options.aborts)
    trials = run([known[name] for name in names], setting, options.times, options.out)
    print(table(trials))
    return 1 if any(trial.error for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Everything that a GPU must show, in one call of less than ten minutes: what the kernels compute, and how fast.

    python benchmarks/gpu_check.py [--out build/gpu_check] [--seconds 570] [--only kernels,workloads] [--again]

writes OUT.json and OUT.md. Its units (`gpu_units.py`) run one after the other, each in a process of its own, because
after a fault of the device a process is lost:

    machine     what the device does at best: copying memory, and multiplying bfloat16 matrices
    build       all kernels are compiled, on all cores
    contracts   the tests of the kernels, on the device
    tokens      greedy float32 tokens of tiny checkpoints equal those of Transformers
    kernels     the time of every example of the kernels, beside what the device does at best
    figure      one request, 4,000 tokens in and 50 out: eager, full, piecewise and full (figure 4.6 of the thesis)
    workloads   W1 to W5 of docs/benchmarks.md, on the shape of an 8B model with random weights

What is measured is written at once. A call that was ended, or that used up its seconds, is gone on with by the same
call; `--again` begins anew. `--device cpu --small` runs all of it in Triton's interpreter, with tiny sizes: so it is
tested where there is no GPU.

Exit code 1: something is wrong. 3: nothing is wrong so far, and something is left to be done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNITS = ("machine", "build", "contracts", "tokens", "kernels", "figure", "workloads")
# of what is measured in the same call: the bandwidth of copies, and the rate of products of bfloat16
GOALS = {"W1": 0.85, "W5": 0.70}
NO_GPU = (
    "gpu_check: torch {} sees no GPU. Where there is one, this needs torch's build for it (one whose version ends in "
    "+cpu is not) and the driver: PYTHON=/path/to/python names an interpreter that has it (docs/gpu.md). Without a GPU "
    'make gpu-check ARGS="--device cpu --small" tries the program out.'
)
# lines of a unit's output that are kept where it failed
_LAST_LINES = 30

Entry = dict[str, Any]
# (unit, entries that are known, seconds) -> its entries, one after the other
RunUnit = Callable[[str, list[str], float], Iterator[tuple[str, Entry]]]


class UnitError(Exception):
    """With the end of what it has printed."""


@dataclass
class Record:
    """What was found so far, on disk after each entry."""

    path: Path
    settings: dict[str, Any]
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path, settings: dict[str, Any], *, is_anew: bool) -> Record:
        if is_anew or not path.exists():
            return cls(path, settings)
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["settings"] != settings:
            raise SystemExit(
                f"{path}: was made with {known['settings']}, not {settings}. Use --again or another --out."
            )
        return cls(path, settings, known["entries"], known["finished"], known["failed"])

    def note(self, unit: str, name: str, entry: Entry) -> None:
        self.entries.setdefault(unit, {})[name] = entry
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = {name: value for name, value in vars(self).items() if name != "path"} | {"wrong": self.wrong}
        other = self.path.with_suffix(".new")
        other.write_text(json.dumps(written, indent=1), encoding="utf-8")
        other.replace(self.path)

    @property
    def wrong(self) -> list[str]:
        """A line for each entry that is not as it must be, and for each unit that broke."""
        lines = [f"{unit}: broke" for unit in self.failed]
        for unit, entries in self.entries.items():
            lines += [f"{unit}: {name}: {entry['error']}" for name, entry in entries.items() if entry.get("error")]
        return lines


def check(record: Record, units: list[str], run_unit: RunUnit, seconds: float, clock: Callable[[], float]) -> bool:
    """Whether all of these units are finished."""
    end = clock() + seconds
    for unit in units:
        if unit in record.finished:
            continue
        left = end - clock()
        if left <= 0:
            return False
        record.failed.pop(unit, None)
        # what went wrong before is tried again
        known = [name for name, entry in record.entries.get(unit, {}).items() if not entry.get("error")]
        try:
            for name, entry in run_unit(unit, known, left):
                record.note(unit, name, entry)
                print(f"{unit:10} {name}: {entry.get('error') or _short(entry)}", flush=True)
        except TimeoutError:
            return False
        except UnitError as error:
            record.failed[unit] = str(error)
            print(f"{unit:10} BROKE\n{error}", flush=True)
        else:
            record.finished.append(unit)
        record.write()
    return all(unit in record.finished for unit in units)


def _short(entry: Entry) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in entry.items()
    )


def in_a_process(settings: dict[str, Any]) -> RunUnit:
    """Units as processes, whose lines of JSON are entries."""

    def run(unit: str, known: list[str], seconds: float) -> Iterator[tuple[str, Entry]]:
        told = json.dumps(settings | {"unit": unit, "known": known, "seconds": seconds})
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "gpu_units.py"), told],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                os.killpg(process.pid, signal.SIGKILL)

            timer = threading.Timer(seconds, end)
            timer.start()
            try:
                for line in process.stdout or ():
                    if line.startswith('{"entry"'):
                        found = json.loads(line)
                        yield found.pop("entry"), found
                status = process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if is_late.is_set():
                raise TimeoutError
            if status:
                log.seek(0)
                raise UnitError("".join(log.readlines()[-_LAST_LINES:]) or f"ended with {status}")

    return run


def page(record: Record) -> str:
    """What a reader wants to know of it."""
    entries = record.entries
    machine = entries.get("machine", {})
    limits = machine.get("limits", {})
    lines = ["# GPU check", ""]
    lines += [f"{name}: {value}  " for name, value in machine.get("versions", {}).items()]
    lines += ["", f"Finished: {', '.join(record.finished) or 'nothing'}.", "", "## What is wrong", ""]
    lines += [f"- {line}" for line in record.wrong] or ["Nothing."]
    if limits:
        lines += ["", "## What the device does at best", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {value:.4g} |" for name, value in limits.items()]
    for unit, title in (("workloads", "Workloads"), ("figure", "One request, 4,000 tokens in and 50 out")):
        lines += _table(title, entries.get(unit, {}), ("value", "unit", "share_of_limit"), GOALS)
    columns = ("microseconds", "share_of_bandwidth", "share_of_matrix_rate")
    lines += _table("Kernels", entries.get("kernels", {}), columns)
    lines += _table("Kernels as compiled", entries.get("build", {}), ("kernels", "registers", "spills", "seconds"))
    lines += _table("Contracts", entries.get("contracts", {}), ("passed", "failed", "skipped"))
    return "\n".join(lines) + "\n"


def _table(
    title: str, entries: dict[str, Entry], columns: tuple[str, ...], goals: dict[str, float] | None = None
) -> list[str]:
    if not entries:
        return []
    heads = ["", *(column.replace("_", " ") for column in columns), *(["goal"] if goals else [])]
    lines = ["", f"## {title}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, entry in entries.items():
        cells = [name, *(_cell(entry.get(column)) for column in columns)]
        if goals:
            cells.append(_cell(goals.get(name.partition(" ")[0]) if entry.get("share_of_limit") is not None else None))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this program out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check")
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--only", default=",".join(UNITS), help="units, with commas between them")
    parser.add_argument("--again", action="store_true", help="forget what an earlier call has found")
    arguments = parser.parse_args()
    units = [unit for unit in UNITS if unit in ("machine", *arguments.only.split(","))]
    unknown = set(arguments.only.split(",")) - set(UNITS)
    if unknown:
        parser.error(f"--only={','.join(sorted(unknown))}: units are {', '.join(UNITS)}.")
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print(NO_GPU.format(torch.__version__), file=sys.stderr)
            return 2
    settings = {"device": arguments.device, "is_small": arguments.small}
    record = Record.at(arguments.out.with_suffix(".json"), settings, is_anew=arguments.again)
    is_done = check(record, units, in_a_process(settings), arguments.seconds, time.monotonic)
    text = page(record)
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{record.path}")
    if record.wrong:
        return 1
    return 0 if is_done else 3


if __name__ == "__main__":
    sys.exit(main())

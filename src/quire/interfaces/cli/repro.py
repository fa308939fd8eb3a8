"""`quire repro`: the paper's figures, out of this engine's own core on a virtual clock (docs/paper.md)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.errors import OptionError
from quire.interfaces.cli.bench_flags import whole_number
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.figures import FIGURES
from quire.simulation.paper.lab import Lab

# of the requests of a run; runs of an hour take about four times as many as are needed
_FULL = 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("figures", nargs="+", metavar="FIGURE", help=f"{', '.join(FIGURES)}, or all")
    parser.add_argument("--full", action="store_true", help="runs of about an hour of the virtual clock")
    parser.add_argument("--scale", default="1", metavar="X", help="of the number of requests in a run (default: 1)")
    parser.add_argument("--jobs", default="2", metavar="N", help="processes (default: 2)")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="another assumption")
    parser.add_argument("--write", metavar="FOLDER", help="write each figure there, as SVG")
    parser.add_argument("--markdown", action="store_true", help="print rows of a table in Markdown")


def run(arguments: argparse.Namespace) -> int:
    names = list(FIGURES) if "all" in arguments.figures else arguments.figures
    unknown = next((name for name in names if name not in FIGURES), None)
    if unknown is not None:
        raise OptionError(f"figure={unknown[:40]}: must be one of {', '.join(FIGURES)}, or all.")
    assumed = Assumptions().assume(arguments.assume)
    lab = Lab(
        assumed,
        scale=_FULL if arguments.full else _scale(arguments.scale),
        num_processes=whole_number("--jobs", arguments.jobs, 1),
        progress=_progress,
    )
    for name in dict.fromkeys(names):
        figure = FIGURES[name]
        report = figure.report(lab.results(figure.tasks(assumed)), assumed)
        print(report.markdown() if arguments.markdown else f"{report.text()}\n", flush=True)
        for file, chart in report.charts.items() if arguments.write else ():
            _write(Path(arguments.write), f"{file}.svg", chart)
    return 0


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.01 <= scale <= 100:
        raise OptionError(f"scale={text[:40]}: must be a number from 0.01 to 100.")
    return scale


def _progress(num_done: int, num_all: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if num_done == num_all else ""
        print(f"\r{num_done} of {num_all} runs", end=end, file=sys.stderr, flush=True)


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--write {folder}: {name} cannot be written ({error.strerror}).") from error

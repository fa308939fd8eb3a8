"""`quire replay`: a run that was recorded, once more, and where it takes another way."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.engine_core.launch import make_executor
from quire.errors import OptionError
from quire.interfaces.cli.bench_flags import whole_number
from quire.observability.perfetto import perfetto_trace
from quire.observability.run_log import RunLog
from quire.simulation.life import life_of, recording_of
from quire.simulation.replay import Replay, Replayed, compare_logs, config_of

_SAME = 0
_DIFFERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="written by quire serve --record LOG")
    parser.add_argument("--no-model", action="store_true", help="no weights: the log answers steps, decisions alone "
                        "are compared")  # fmt: skip
    parser.add_argument("--model", metavar="FOLDER", help="where the model lies here, if not where it was recorded")
    parser.add_argument("--until", metavar="N", help="stop after step N")
    parser.add_argument("--explain", metavar="REQUEST", help="tell the life of a request, by its number")
    parser.add_argument("--against", metavar="LOG", help="compare with another log; nothing is run")
    parser.add_argument("--trace", metavar="FILE", help="write a trace there that ui.perfetto.dev opens")


def run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.log)
    until = None if arguments.until is None else whole_number("--until", arguments.until, 1)
    request = None if arguments.explain is None else whole_number("--explain", arguments.explain, 0)
    if arguments.against is not None:
        return _told(compare_logs(path, Path(arguments.against), until), "compared")
    log = RunLog(path)
    header = log.header
    has_model = not (arguments.no_model or request is not None or arguments.trace)
    print(f"{path}: recorded {header.date} by Quire {header.version}, {header.model}")
    workers = make_executor(config_of(header, arguments.model).worker) if has_model else None
    looks_inside = request is not None or arguments.trace is not None
    replay = Replay(log, workers, keeps_decisions=looks_inside)
    replayed = replay.run(until)
    if looks_inside:
        recording = recording_of(replay)
        if request is not None:
            print(life_of(request, recording))
        if arguments.trace is not None:
            _write(arguments.trace, json.dumps(perfetto_trace(recording)))
    return _told(replayed, "replayed with the model" if has_model else "replayed without the model")


def _told(replayed: Replayed, done: str) -> int:
    differences = "0 differences" if replayed.difference is None else "they differ"
    print(
        f"{done}: {replayed.num_steps:,} steps, {replayed.num_requests:,} requests, {replayed.num_tokens:,} tokens of "
        f"{replayed.seconds:,.1f} s: {differences}"
    )
    if replayed.ending:
        print(f"the log ends: {replayed.ending}")
    if replayed.difference is None:
        return _SAME
    print(replayed.difference.picture())
    return _DIFFERS


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--trace {file}: cannot be written ({error.strerror}).") from error

"""`quire bench start` (W7): from the start of a process to its first token.

Each start is a process of its own, timed from outside. Before the first one the model's files are dropped from the
system's cache, so that they come from the disk; the others find them in memory. Kernels and Python's modules are
compiled before: both are made once in the life of an installation.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.config.model_source import locate
from quire.errors import EngineError
from quire.interfaces.cli.bench_flags import add_json_flag, finish, whole_number
from quire.interfaces.cli.bench_numbers import Result
from quire.interfaces.cli.bench_sheet import Sheet
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of

_IMPORT = "import time; start = time.perf_counter(); import quire; print(time.perf_counter() - start)"
_FIRST_TOKEN = """
import json, sys
from quire import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[1]))
sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
print("first token", flush=True)
llm.shutdown()
"""
_LIMIT_SECONDS = 600


class StartWorkload:
    """The command."""

    description = "W7: importing Quire, and from the start of a process to its first token"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [MODEL] [options]"
        add_model_argument(parser)
        group = parser.add_argument_group("measuring")
        group.add_argument("--rounds", default="5", metavar="N", help="starts after the first one (default: 5)")
        add_json_flag(group)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        options = engine_options_of(arguments)
        rounds = whole_number("--rounds", arguments.rounds, 1)
        model = str(options.get("model", EngineOptions().model))
        sheet = Sheet()
        _compile_modules()
        for _ in range(rounds):
            sheet.note("import quire", seconds_to_import(), "s")
        _drop_from_memory(locate(model))
        sheet.note("first start, from the disk", seconds_to_first_token(options), "s")
        for _ in range(rounds):
            sheet.note("further starts", seconds_to_first_token(options), "s")
        return finish(Result("W7", "start to first token", model, {"rounds": rounds}, sheet.measures), arguments)


START = StartWorkload()


def own_environment() -> dict[str, str]:
    """For processes that must run this Quire and not one that is installed beside it."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def seconds_to_import() -> float:
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True, env=own_environment()
    )
    return float(done.stdout)


def seconds_to_first_token(options: dict[str, Any]) -> float:
    command = [sys.executable, "-c", _FIRST_TOKEN, json.dumps(options)]
    # What it says goes to a file: a pipe that nobody reads would be full at some time, and hold it up.
    with tempfile.TemporaryFile() as words:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, env=own_environment()) as process:
            assert process.stdout is not None
            end = threading.Timer(_LIMIT_SECONDS, process.kill)
            end.daemon = True
            end.start()
            line = process.stdout.readline()
            seconds = time.perf_counter() - start
            process.communicate()
            end.cancel()
        if line.strip() == b"first token":
            return seconds
        words.seek(0)
        said = words.read().decode(errors="replace")[-2000:]
    raise EngineError(f"the process ended without a token, or took {_LIMIT_SECONDS} s. It said:\n{said}")


def _compile_modules() -> None:
    """As an installer does; a checkout that is run as it is compiles them at every start if Python may not write."""
    compileall.compile_dir(str(Path(__file__).parents[2]), quiet=2)


def _drop_from_memory(path: Path) -> None:
    """Asks the system to forget what it has of these files; it may decline."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.iterdir() if path.is_dir() else [path]:
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

"""Breaks a server in every way that is known, so many times each, and says what came of it.

    python -m tests.support.faults --times 1                       each fault once; how often else stands with each
    python -m tests.support.faults --only F1,F3 --times 20 --out build/faults.json
    python -m tests.support.faults --paced --small                 few streams, small numbers, and few models

With --out the results are added to the file, and what is there already is not done again: a run that was stopped goes
on, and several runs add up. Exit status 1: a goal was missed, or something happened that must not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from tests.support.faults.cases import CASES
from tests.support.faults.stage import Setting
from tests.support.faults.trials import run, table

# options that are numbers of the setting, with what they say
_NUMBERS = {
    "num_streams": "live streams meanwhile",
    "stall_timeout": "T of F3, in seconds",
    "num_rounds": "faults of one kind on one server: F6, F7, F9, F17",
    "num_operations": "operations without memory: F8",
    "num_leaves": "times that a client leaves in each of ten ways: F10",
    "num_aborts": "requests of the storm: F11",
    "num_slow_readers": "clients that read slowly, and as many that read nothing: F12",
    "slow_seconds": "how long they come: F12",
    "num_half_open": "connections that fall silent: F13",
    "num_frames": "frames of garbage in each direction: F14",
    "num_hostile": "hostile requests in all: H1 to H3",
    "seed": "that of the first of them: an error names its own",
    "num_bombs": "templates and tokenizers: H4, H4b",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="ids of faults, such as F1,F3; a * at the end stands for all that begin so")
    parser.add_argument("--times", type=int, help="how often each, those in the file included")
    parser.add_argument("--paced", action="store_true", help="a core without a model, except where there must be one")
    parser.add_argument("--small", action="store_true", help="all numbers below small")
    parser.add_argument("--out", type=Path, help="a file that sums up the results")
    for name, what in _NUMBERS.items():
        kind = type(getattr(Setting(), name))
        parser.add_argument(f"--{name.removeprefix('num_').replace('_', '-')}", dest=name, type=kind, help=what)
    options = parser.parse_args(arguments)
    setting = replace(Setting.small() if options.small else Setting(), is_paced=options.paced)
    given = {field.name: getattr(options, field.name, None) for field in fields(Setting) if field.name in _NUMBERS}
    setting = replace(setting, **{name: value for name, value in given.items() if value is not None})
    names = options.only.split(",") if options.only else ["*"]
    cases = [case for case in CASES if any(_is_meant(case.id, name) for name in names)]
    unknown = [name for name in names if not any(_is_meant(case.id, name) for case in CASES)]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(case.id for case in CASES)}")
    trials = run(cases, setting, options.times, options.out)
    print(table(trials))
    return 1 if any(trial.error for trial in trials) else 0


def _is_meant(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


if __name__ == "__main__":
    sys.exit(main())

"""Loads a server of its own, prints what was measured as JSON, and ends with 1 if a goal failed. docs/reliability.md
says what each load is and what its goals are."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.load.concurrent import concurrent
from tests.support.load.fair import fair
from tests.support.load.idle import idle
from tests.support.load.many import many
from tests.support.load.overload import overload
from tests.support.load.servers import ENGINES

from quire.errors import UserError


def main() -> int:
    arguments = _parser().parse_args()
    try:
        figures = arguments.run(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2))
    return 1 if figures["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.support.load", description=__doc__)
    loads = parser.add_subparsers(required=True, metavar="LOAD")

    load = _add(loads, "overload", lambda a: asyncio.run(overload(a.seconds, a.seed)), "four times its capacity")
    _number(load, "--seconds", 600.0, "of each of two parts")
    _number(load, "--seed", 0)

    load = _add(loads, "many", _many, "very many requests of all kinds, one after the other")
    _engine(load, "null", ("null", "embedded"))
    _number(load, "--requests", 1_000_000, "in all pieces")
    _number(load, "--seconds", 600.0, "of this piece, at most")
    _number(load, "--seed", 0)
    load.add_argument("--state", type=Path, help="file that sums up the pieces")

    load = _add(
        loads, "concurrent", lambda a: concurrent(a.engine, a.streams, a.waves, a.long_prompts), "streams at once"
    )
    _engine(load, "null")
    _number(load, "--streams", 512)
    _number(load, "--waves", 1, "how often they come")
    _number(load, "--long-prompts", 0, "of 8 MiB, beside each wave")

    load = _add(loads, "idle", lambda a: idle(a.engine, a.idle, a.loris, a.seconds), "connections that do nothing")
    _engine(load, "null")
    _number(load, "--idle", 4096, "connections that ask once")
    _number(load, "--loris", 1000, "connections that send a head byte by byte")
    _number(load, "--seconds", 30.0, "of each of two parts")

    load = _add(loads, "fair", _fair, "one short among long prompts")
    _engine(load, "embedded")
    _number(load, "--streams", 64)
    _number(load, "--seconds", 30.0, "of each of two parts")
    _number(load, "--seed", 0)
    load.add_argument("--policy", default="two_level", help="of the scheduler (default: %(default)s)")
    _number(load, "--budget", 2048, "most tokens of a step")
    _number(load, "--priority", 0, "of the short request")
    return parser


def _add(loads: Any, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    load: argparse.ArgumentParser = loads.add_parser(name, help=what, description=what)
    load.set_defaults(run=run)
    return load


def _engine(load: argparse.ArgumentParser, default: str, engines: tuple[str, ...] = ENGINES) -> None:
    load.add_argument("--engine", choices=engines, default=default, help="(default: %(default)s)")


def _number(load: argparse.ArgumentParser, name: str, default: float, what: str = "") -> None:
    load.add_argument(name, type=type(default), default=default, help=f"{what} (default: %(default)s)".strip())


def _fair(asked: argparse.Namespace) -> dict[str, Any]:
    server = {"policy": asked.policy, "budget": asked.budget}
    return fair(asked.engine, asked.streams, asked.seconds, asked.seed, priority=asked.priority, **server)


def _many(arguments: argparse.Namespace) -> dict[str, Any]:
    state = many(arguments.engine, arguments.requests, arguments.seconds, arguments.seed, arguments.state)
    a_second = round(state.num_requests / max(state.seconds, 1e-9))
    return {**asdict(state), "requests_a_second": a_second, "failed": state.failures()}


if __name__ == "__main__":
    sys.exit(main())

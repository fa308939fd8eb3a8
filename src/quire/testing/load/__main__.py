"""`python -m quire.testing.load overload|many|concurrent`. Prints what was measured; ends with 1 if a goal failed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.testing.load.concurrent import concurrent
from quire.testing.load.many import many
from quire.testing.load.overload import overload


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.testing.load", description=__doc__)
    parser.add_argument("load", choices=["overload", "many", "concurrent"])
    parser.add_argument("--seconds", type=float, default=600.0, help="of a part, or of a piece (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["null", "embedded"], default="null", help="of many and concurrent")
    parser.add_argument("--streams", type=int, default=512, help="of concurrent (default: %(default)s)")
    group = parser.add_argument_group("many")
    group.add_argument("--requests", type=int, default=1_000_000, help="in all pieces (default: %(default)s)")
    group.add_argument("--state", type=Path, help="file that sums up the pieces")
    arguments = parser.parse_args()
    if arguments.load == "overload":
        figures = asyncio.run(overload(arguments.seconds, arguments.seed))
    elif arguments.load == "concurrent":
        figures = concurrent(arguments.engine, arguments.streams)
    else:
        figures = _many(arguments)
    print(json.dumps(figures, indent=2))
    return 1 if figures["failed"] else 0


def _many(arguments: argparse.Namespace) -> dict[str, Any]:
    state = many(arguments.engine, arguments.requests, arguments.seconds, arguments.seed, arguments.state)
    a_second = round(state.num_requests / max(state.seconds, 1e-9))
    return {**asdict(state), "requests_a_second": a_second, "failed": state.failures()}


if __name__ == "__main__":
    sys.exit(main())

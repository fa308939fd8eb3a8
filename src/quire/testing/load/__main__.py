"""`python -m quire.testing.load overload|many`: one load. Prints what was measured; ends with 1 if a goal failed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.testing.load.many import many
from quire.testing.load.overload import overload


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.testing.load", description=__doc__)
    parser.add_argument("load", choices=["overload", "many"])
    parser.add_argument("--seconds", type=float, default=600.0, help="of a part, or of a piece (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("many")
    group.add_argument("--engine", choices=["null", "embedded"], default="null")
    group.add_argument("--requests", type=int, default=1_000_000, help="in all pieces (default: %(default)s)")
    group.add_argument("--state", type=Path, help="file that sums up the pieces")
    arguments = parser.parse_args()
    if arguments.load == "overload":
        figures = asyncio.run(overload(arguments.seconds, arguments.seed))
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

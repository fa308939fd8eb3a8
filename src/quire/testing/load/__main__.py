"""`python -m quire.testing.load overload`: one load. Prints what was measured as JSON; ends with 1 if a goal failed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from quire.testing.load.overload import overload


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.testing.load", description=__doc__)
    parser.add_argument("load", choices=["overload"])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each of the two parts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figures = asyncio.run(overload(arguments.seconds, arguments.seed))
    print(json.dumps(figures, indent=2))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

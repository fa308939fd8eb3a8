"""Runs all pairs and writes docs/composition.md: python -m tests.composition --write docs/composition.md"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.composition.page import page, pairs
from tests.composition.refusals import REFUSALS
from tests.composition.runs import House, RefusedError, compare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.composition", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the page goes; else it is printed")
    write_to = parser.parse_args().write
    refusals: dict[frozenset[str], str] = {}
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        for pair in pairs():
            try:
                compare(house, pair)
            except RefusedError as refused:
                expected = REFUSALS.get(pair, "")
                refusals[pair] = expected or str(refused)
                if expected and expected in str(refused):
                    continue
                print(f"{' + '.join(sorted(pair))}: refused with {refused}", file=sys.stderr)
                num_wrong += 1
            except AssertionError as error:
                print(error, file=sys.stderr)
                num_wrong += 1
    if num_wrong:
        print(f"{num_wrong} pairs differ; nothing is written", file=sys.stderr)
        return 1
    if write_to is None:
        print(page(refusals))
    else:
        write_to.write_text(page(refusals), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

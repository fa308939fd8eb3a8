"""`python -m tests.model_table --write [--column NAME ...] [model_type ...]`: run the rows (all without names), and
write what came out. `--column "two workers" gpt2 opt` runs one cell of two rows."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from tests.model_table.checks import CHECKS, Subject, how, run
from tests.model_table.page import RESULTS, read_results, write
from tests.model_table.rows import ROWS

from quire.errors import one_line


def main(names: list[str], columns: list[str]) -> None:
    """Rows and columns that are not named keep what they have; what is missing in a row is run."""
    logging.disable(logging.WARNING)
    before = read_results() if RESULTS.exists() else {}
    results = {name: before[name] for name in ROWS if name in before}
    for name in names or list(ROWS):
        with tempfile.TemporaryDirectory() as folder:
            subject = Subject(ROWS[name], Path(folder))
            cells = {"how": how(subject)}
            if cells["how"] in ("native", "Transformers"):
                for column in CHECKS:
                    known = before.get(name, {}).get(column)
                    if column not in columns and known is not None:
                        cells[column] = known
                        continue
                    try:
                        cells[column] = run(subject, column)
                    except Exception as error:
                        cells[column] = f"fails: {type(error).__name__}: {one_line(error)}"
        print(name, cells, flush=True)
        results[name] = cells
        write({row: results[row] for row in ROWS if row in results}, Path("docs"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.model_table")
    parser.add_argument("names", nargs="*", metavar="model_type")
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--column", action="append", choices=list(CHECKS), help="run this one alone (may be repeated)")
    arguments = parser.parse_args()
    main(arguments.names, arguments.column or list(CHECKS))

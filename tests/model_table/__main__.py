"""`python -m tests.model_table --write [--quick] [model_type ...]`: run the rows (all without names), and write what
came out."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from tests.model_table.checks import CHECKS, NOT_RUN, SLOW, Subject, how, run
from tests.model_table.page import RESULTS, read_results, write
from tests.model_table.rows import ROWS

from quire.errors import one_line


def main(names: list[str], *, is_quick: bool) -> None:
    """Rows that are not named keep what they have, and so do columns that take seconds if it is to be quick."""
    logging.disable(logging.WARNING)
    before = read_results() if RESULTS.exists() else {}
    results = {name: before[name] for name in ROWS if name in before}
    for name in names or list(ROWS):
        with tempfile.TemporaryDirectory() as folder:
            subject = Subject(ROWS[name], Path(folder))
            cells = {"how": how(subject)}
            if cells["how"] in ("native", "Transformers"):
                for column in CHECKS:
                    if column in SLOW and is_quick:
                        cells[column] = before.get(name, {}).get(column, NOT_RUN)
                        continue
                    try:
                        cells[column] = run(subject, column)
                    except Exception as error:
                        cells[column] = f"fails: {type(error).__name__}: {one_line(error)}"
        print(name, cells, flush=True)
        results[name] = cells
        write({row: results[row] for row in ROWS if row in results}, Path("docs"))


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if not name.startswith("--")], is_quick="--quick" in sys.argv)

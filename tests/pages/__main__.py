"""Writes the pages that are made from the code alone: python -m tests.pages --write docs

fields.md and metrics.md (their tables), options.md, coming-from.md. A test compares each with what the code makes, so
nothing that is added there can be missing here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.pages import coming_from, tables

from quire.interfaces.cli import options


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FOLDER", required=True, help="where the pages are (docs)")
    folder = parser.parse_args().write
    try:
        changed = tables.write(folder)
        for name, text in (("options.md", options.markdown()), (coming_from.NAME, coming_from.markdown())):
            page = folder / name
            if page.read_text(encoding="utf-8") != text:
                page.write_text(text, encoding="utf-8")
                changed.append(name)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"changed: {', '.join(changed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which form a trace has: each form is a file beside this one with a function `read`."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

from quire.errors import suggestion
from quire.simulation.traces import azure, drawn, json_lines, mooncake, sharegpt
from quire.simulation.traces.table import ReadTrace, TraceError, lines_of

Reader = Callable[[Path], ReadTrace]


def open_trace(name: str) -> ReadTrace:
    """The trace in this file. TraceError says what is wrong with it, in one line."""
    path = Path(os.path.expanduser(name))
    try:
        if not path.is_file():
            names = drawn.names()
            hint = suggestion(name, names) or ""
            raise TraceError(f"trace={name[:120]}: there is no such file, nor a workload {', '.join(names)}.{hint}")
        return _reader_of(path)(path)
    except OSError as error:
        raise TraceError(f"trace={name[:120]}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is no text.") from None
    except csv.Error as error:
        raise TraceError(f"{path}: is no CSV ({error}).") from None
    except RecursionError:
        raise TraceError(f"{path}: is nested too deeply.") from None


def _reader_of(path: Path) -> Reader:
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return mooncake.read if _is_mooncake(path) else json_lines.read
    readers: dict[str, Reader] = {".csv": azure.read, ".json": sharegpt.read}
    if kind not in readers:
        raise TraceError(f"trace={path}: must end in {', '.join(readers)} or .jsonl, by which its form is known.")
    return readers[kind]


def _is_mooncake(path: Path) -> bool:
    """By the first line, which the reader judges."""
    try:
        return "input_length" in json.loads(next(lines_of(path), ""))
    except (ValueError, TypeError):
        return False

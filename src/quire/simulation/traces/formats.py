"""Which form a trace has, by its name: each form is a file beside this one with a function `read`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.simulation.traces import azure
from quire.simulation.traces.table import ReadTrace, TraceError

FORMS: dict[str, Callable[[Path], ReadTrace]] = {".csv": azure.read}


def open_trace(name: str) -> ReadTrace:
    """The trace in this file. TraceError says what is wrong with it, in one line."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise TraceError(f"trace={name[:120]}: there is no such file.")
    read = FORMS.get(path.suffix.lower())
    if read is None:
        raise TraceError(f"trace={name[:120]}: must end in {', '.join(FORMS)}.")
    try:
        return read(path)
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is no text.") from None

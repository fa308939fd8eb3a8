"""How much processor time each turn of a server's event loop takes. Imported by the process of the server, first.

A turn is one call of the loop: nobody else is served meanwhile. The loop is asyncio's own instead of uvloop, whose
calls cannot be seen. The times are written when the process ends, into the file that the environment names.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "QUIRE_TURNS"
_MOST_SHOWN = 5

_seconds = array.array("d")
_longest: list[tuple[float, str]] = []
_run = asyncio.events.Handle._run


def _timed(self: asyncio.events.Handle) -> Any:
    before = time.thread_time()
    try:
        return _run(self)
    finally:
        took = time.thread_time() - before
        _seconds.append(took)
        if len(_longest) < _MOST_SHOWN or took > _longest[0][0]:
            _longest.append((took, repr(self)[:200]))
            _longest.sort()
            del _longest[:-_MOST_SHOWN]


def _write() -> None:
    ordered = sorted(_seconds)
    figures = {
        "num_turns": len(ordered),
        "longest": ordered[-1] if ordered else 0.0,
        "p999": ordered[len(ordered) * 999 // 1000] if ordered else 0.0,
        "what": [f"{seconds:.3f} {what}" for seconds, what in reversed(_longest)],
    }
    Path(os.environ[VARIABLE]).write_text(json.dumps(figures), encoding="utf-8")


if VARIABLE in os.environ:
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    asyncio.events.Handle._run = _timed  # type: ignore[method-assign]
    atexit.register(_write)
    # processes that it starts have turns of their own
    os.environ["PYTHONUNBUFFERED"] = "1"

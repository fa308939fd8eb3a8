"""How much processor time each turn of a server's event loop takes. Imported by the process of the server, first.

A turn is one call of the loop: nobody else is served meanwhile. The loop is asyncio's own instead of uvloop, whose
calls cannot be seen. SIGUSR1 forgets the turns so far, those of the start; SIGUSR2 writes the file that the environment
names.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import signal
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


def _forget(*_: object) -> None:
    del _seconds[:], _longest[:]


def _write(*_: object) -> None:
    ordered = sorted(_seconds)
    figures = {
        "num_turns": len(ordered),
        "longest": ordered[-1] if ordered else 0.0,
        "p999": ordered[len(ordered) * 999 // 1000] if ordered else 0.0,
        "what": [f"{seconds:.3f} {what}" for seconds, what in reversed(_longest)],
    }
    file = Path(os.environ[VARIABLE])
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(figures), encoding="utf-8")
    partial.replace(file)


if VARIABLE in os.environ:
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    asyncio.events.Handle._run = _timed  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, _forget)
    signal.signal(signal.SIGUSR2, _write)

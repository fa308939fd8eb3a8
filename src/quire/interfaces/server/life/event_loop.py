"""The event loop of a server's processes: uvloop where there is one."""

from __future__ import annotations

from typing import Any


def loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # pragma: no cover - not on every platform
        return None
    return uvloop.new_event_loop

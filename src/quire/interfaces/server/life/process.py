"""What each process of a server needs, from its event loop to its end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("quire.server")


def loop_factory() -> Any:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:  # pragma: no cover - not on every platform
        return None
    return uvloop.new_event_loop


# Passes through the newest thousands of objects, from one through all of them to the next; Python's own number is 10.
# With 1,024 streams one through all takes 35 to 65 ms.
_PASSES_APART = 100


@contextmanager
def set_aside() -> Iterator[None]:
    """What was made until here lives to the end of the block: the garbage collector need not look at it.

    Everybody waits while it looks through all objects: with 512 streams 60 to 90 ms of processor time, half of it for
    what importing and starting leave behind.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _PASSES_APART)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def end_each(**steps: Callable[[], Awaitable[object]]) -> None:
    """One after the other, none left out because an earlier one failed. `steps` by what they end, as the log is to call
    it."""
    for name, step in steps.items():
        try:
            await step()
        except Exception:
            logger.exception("%s: its end failed; the end of the server goes on", name.replace("_", " "))

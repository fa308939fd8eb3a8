"""Long texts become tokens beside the event loop, a few at a time.

Owns daemon threads, and not the loop's own: a text cannot be stopped while it is tokenised, and the end of the process
must not wait for it. Few, because each takes a core and a hundred times its text in memory. Called by AsyncLLM and the
server; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST_AT_ONCE = 2
# For shorter texts the way to a thread and back costs more than the work.
LONG_TEXT = 4096


class TextThreads:
    """Calls that leave the event loop free."""

    def __init__(self, most: int = _MOST_AT_ONCE) -> None:
        self._slots = asyncio.Semaphore(most)

    async def call(self, function: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """What the function returns or raises. A caller that is cancelled leaves; its slot is taken until the end."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            self._slots.release()
            if not future.done():
                set_outcome(outcome)

        def work() -> None:
            try:
                outcome: Any = function(*args, **options)
                set_outcome: Callable[[Any], None] = future.set_result
            except Exception as error:
                set_outcome = future.set_exception
                outcome = error
            # RuntimeError: the loop was closed meanwhile, nobody waits
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, set_outcome, outcome)

        threading.Thread(target=work, name="quire-text", daemon=True).start()
        return await future

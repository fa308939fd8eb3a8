"""A computation that does not end: it is ended by an exception in its own thread, so that whoever made it can be found.

Time decides here as the last resort. What a request may cost is bounded elsewhere by counting; this is for what nobody
has thought of, such as a processor of one's own that loops. Native code is not interrupted: the exception comes when it
returns, and if it never does, whoever watches the engine ends it.

Owns a thread that looks at the clock twice a second. Called by StepIsolation, which says how long is too long.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

# a step may take so many times as long as its tokens took when they were measured
_TIMES_MEASURED = 4.0
_LOOK_SECONDS = 0.5
# the limit of the work that a thread runs
_current = threading.local()
# An exception that was set for a thread is raised when that thread next jumps back in Python code.
_FEW_JUMPS = 100


class TooLongError(Exception):
    """It was ended because it took too long."""

    def __init__(self) -> None:
        super().__init__("the step took far longer than its tokens do, and was ended")


@dataclass
class Patience:
    """How long a step may take, beyond what its tokens take. A part of one that took too long gets a quarter of it."""

    seconds: float
    seconds_per_token: float = 0.0

    def of_step(self, num_tokens: int) -> float:
        return self.seconds + _TIMES_MEASURED * num_tokens * self.seconds_per_token

    def of_part(self, num_tokens: int) -> float:
        return self.seconds / 4 + _TIMES_MEASURED * num_tokens * self.seconds_per_token

    def grow(self) -> None:
        """It took long, and nobody was to blame."""
        self.seconds *= 2


@dataclass(eq=False)
class _Limit:
    thread: int
    deadline: float
    # the exception was set, by the watching thread
    is_set: threading.Event = field(default_factory=threading.Event)


class Watch:
    """Runs work that may take so long. For one thread."""

    def __init__(self) -> None:
        # At most one. Whoever takes it out decides: the worker's thread that its work has ended, the watching one that
        # it ends it. So an exception comes while `run` waits for it, and never later.
        self._running: list[_Limit] = []
        self.is_closed = False
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """Raises TooLongError in the middle of the work."""
        if self._thread is None:
            self._thread = threading.Thread(target=_look, args=(weakref.ref(self),), name="quire-watch", daemon=True)
            self._thread.start()
        limit = _Limit(threading.get_ident(), time.monotonic() + seconds)
        self._running.append(limit)
        _current.limit = limit
        try:
            return work()
        finally:
            _current.limit = None
            self._end(limit)

    def _end(self, limit: _Limit) -> None:
        try:
            self._running.remove(limit)
        except ValueError:
            # The exception is on its way, unless it has come while the work ran: then nothing more comes here. It is
            # not called back: setting none leaves CPython 3.11 looking for one at every jump for ever, all Python code
            # is slower from then on, and with a profiler the interpreter hangs.
            limit.is_set.wait()
            for _ in range(_FEW_JUMPS):
                pass

    def look(self) -> None:
        for limit in list(self._running):
            if time.monotonic() > limit.deadline:
                self._interrupt(limit)

    def _interrupt(self, limit: _Limit) -> None:
        try:
            self._running.remove(limit)
        except ValueError:
            return  # it has ended just now
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(limit.thread), ctypes.py_object(TooLongError))
        limit.is_set.set()

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def uncounted() -> Iterator[None]:
    """What runs here is bounded in another way: it takes nothing of the time that the work of this thread may take."""
    limit = getattr(_current, "limit", None) or _Limit(threading.get_ident(), math.inf)
    deadline = limit.deadline
    start = time.monotonic()
    limit.deadline = math.inf
    try:
        yield
    finally:
        limit.deadline = deadline + time.monotonic() - start


def _look(reference: weakref.ref[Watch]) -> None:
    """Ends with the watch, also where nobody has closed it."""
    while (watch := reference()) is not None and not watch.is_closed:
        watch.look()
        del watch
        time.sleep(_LOOK_SECONDS)

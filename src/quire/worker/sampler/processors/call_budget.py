"""How long a function over single rows may take in steps that others share.

One that a request names has an allowance, which each call fills up a little and uses up by its time. One that is the
program's own may be slow, but must come to an end. A call that takes too long is interrupted where the interpreter gets
to: in Python code, not in a call into C that never returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

# At once, and with every token.
MOST_SECONDS = 1.0
SECONDS_A_CALL = 0.02
# Of one call, where others must find the same.
SECONDS_OF_RANKS = 5.0
# Of one call of a function that is the program's own: its first one may read files.
SECONDS_OF_PROGRAM = 10.0
_IDLE_SECONDS = 60.0
_TURN_SECONDS = 0.0001


class TooSlowError(Exception):
    """It has used up what it may take of the steps of others."""

    def __init__(self, allowed: str) -> None:
        super().__init__(f"it takes too long: {allowed} of steps that others share")


class _Interruption(BaseException):
    """No function catches it by accident."""


class Budget(Protocol):
    """What may be called, and for how long."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What it returns or raises; TooSlowError where that took too long."""
        ...


class CallBudget:
    """The allowance of one function of one sequence."""

    def __init__(self) -> None:
        self._left = MOST_SECONDS

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._left = min(MOST_SECONDS, self._left + SECONDS_A_CALL)
        start = time.monotonic()
        try:
            return _interrupter.call(self._left, lambda: function(*args, **kwargs))
        finally:
            self._left -= time.monotonic() - start
            if self._left < 0:
                raise TooSlowError(
                    f"{SECONDS_A_CALL:g} s a token and {MOST_SECONDS:g} s at once are what one request may take"
                ) from None


class EqualBudget:
    """Several workers draw the same tokens, and an engine ends where they differ: what takes about as long as it may
    would be too slow for one of them alone. Only what does not come to an end is interrupted."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _interrupter.call(SECONDS_OF_RANKS, lambda: function(*args, **kwargs))


class ProgramBudget:
    """Of what the program brings itself. Only what does not come to an end is interrupted."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _interrupter.call(SECONDS_OF_PROGRAM, lambda: function(*args, **kwargs))


class _Call:
    """One that is watched. Whoever takes its end decides how it ends: the caller, or the thread that interrupts it."""

    def __init__(self, seconds: float) -> None:
        self.thread = threading.get_ident()
        self.deadline = time.monotonic() + seconds
        self._end = threading.Lock()
        self._is_interrupted = False

    def interrupt(self) -> None:
        if self._end.acquire(blocking=False):
            _raise_in(self.thread, _Interruption)
            self._is_interrupted = True

    def leave(self) -> None:
        """After this no interruption comes any more: one that was sent comes here, or came before."""
        if self._end.acquire(blocking=False):
            return
        while not self._is_interrupted:
            time.sleep(_TURN_SECONDS)
        # where the interpreter looks for it
        time.sleep(0)


class _Interrupter:
    """Watches over the calls that workers make, in a thread that sleeps while there are none.

    An interruption comes at any instruction of the caller, so the caller holds no lock that others wait for: an
    interruption between taking one and remembering it would leave it taken for ever. The queue's `put` is one step.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, seconds: float, function: Callable[[], Any]) -> Any:
        self._be_there()
        call = _Call(seconds)
        try:
            self._calls.put(call)
            try:
                return function()
            finally:
                call.leave()
        except _Interruption:
            raise TooSlowError(f"{seconds:.3g} s at once are what one call may take") from None

    def _be_there(self) -> None:
        with self._start:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="quire-interrupter", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        # of each thread the last one: those before it are over
        calls: dict[int, _Call] = {}
        while True:
            now = time.monotonic()
            for call in [call for call in calls.values() if call.deadline <= now]:
                del calls[call.thread]
                call.interrupt()
            first = min((call.deadline for call in calls.values()), default=now + _IDLE_SECONDS)
            with contextlib.suppress(queue.Empty):
                call = self._calls.get(timeout=max(0.0, first - now))
                calls[call.thread] = call


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """At its next instruction of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


_interrupter = _Interrupter()

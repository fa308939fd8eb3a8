"""Calls of hooks: in threads of their own, a bounded number at once, each with an end to patience.

A thread cannot be killed: one whose call takes too long is left to itself and replaced, a bounded number of times. What
waits for a thread is bounded, too. Belongs to one event loop; the threads never end the process late.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from quire.interfaces.hooks.unhooked import unhooked

# they mostly wait: for the engine, or for somebody far away
_NUM_THREADS = 64
# those that are left behind in a call that does not end
_MOST_LOST = 32
_MOST_WAITING = 4096

Done = Callable[[Any, Exception | None], None]


class HookOverloadError(Exception):
    """Too many calls wait already."""


class HookTimeoutError(Exception):
    """A call took too long."""


class _Call:
    """One, on its way to a thread and back."""

    def __init__(self, function: Callable[[], Any], done: Done, loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.done: Done | None = done
        self.loop = loop
        self.is_running = False
        self.patience: asyncio.TimerHandle | None = None


class HookThreads:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._num_threads = 0
        # in a call that nobody waits for any more
        self._num_lost = 0
        self._num_waiting = 0
        self._lock = threading.Lock()

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def call(self, function: Callable[[], Any], seconds: float, done: Done) -> Callable[[], None]:
        """Has `done` called on this loop with what the function returns or raises, or when it takes too long. What it
        returns takes back the wish to hear of it."""
        loop = asyncio.get_running_loop()
        if self._num_waiting >= _MOST_WAITING or self._num_lost >= _MOST_LOST:
            what = f"{self._num_lost} calls hang" if self._num_lost >= _MOST_LOST else "too many calls wait"
            handle = loop.call_soon(done, None, HookOverloadError(what))
            return handle.cancel
        call = _Call(function, done, loop)
        call.patience = loop.call_later(seconds, self._give_up, call, seconds)
        self._num_waiting += 1
        self._queue.put(call)
        self._staff()

        def take_back() -> None:
            self._forget(call)

        return take_back

    def _staff(self) -> None:
        """As many threads as there may be, besides those that are lost."""
        with self._lock:
            is_short = self._num_threads < min(_NUM_THREADS, self._num_waiting)
            self._num_threads += is_short
        if is_short:
            threading.Thread(target=self._work, name="quire-hook", daemon=True).start()

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            with self._lock:
                is_wanted = call.done is not None
                call.is_running = is_wanted
            if not is_wanted:
                continue
            outcome: Any = None
            error: Exception | None = None
            try:
                with unhooked():
                    outcome = call.function()
            except Exception as raised:
                error = raised
            with self._lock:
                was_lost = not call.is_running
                call.is_running = False
                self._num_lost -= was_lost
            # RuntimeError: the loop was closed meanwhile, nobody waits
            with contextlib.suppress(RuntimeError):
                call.loop.call_soon_threadsafe(self._finish, call, outcome, error)
            if was_lost:
                return

    def _finish(self, call: _Call, outcome: Any, error: Exception | None) -> None:
        done = self._forget(call)
        if done is not None:
            done(outcome, error)

    def _give_up(self, call: _Call, seconds: float) -> None:
        done = self._forget(call)
        if done is not None:
            done(None, HookTimeoutError(f"no answer in {seconds:g} s"))

    def _forget(self, call: _Call) -> Done | None:
        """Nobody waits for it any more. A thread that is in it is lost until it returns."""
        done = call.done
        if done is None:
            return None
        if call.patience is not None:
            call.patience.cancel()
        self._num_waiting -= 1
        with self._lock:
            call.done = None
            if call.is_running:
                call.is_running = False
                self._num_lost += 1
                self._num_threads -= 1
        if self._num_waiting:
            self._staff()
        return done

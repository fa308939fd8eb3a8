"""An event loop in a thread of its own, for callers that block: what LLM does is done there.

Owns the loop and the thread. Work that a caller waits for is cancelled when the caller is interrupted (Ctrl-C), and has
cleaned up before the caller goes on. Works where the caller's own thread has a running loop, as in a notebook.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.errors import EngineDeadError

_T = TypeVar("_T")
# What the work gives its caller to do in the caller's thread, such as moving a progress bar.
News = queue.SimpleQueue[Callable[[], None] | None]


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Work that goes on by itself."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T], news: News | None = None) -> _T:
        """The work's result, or what it raises."""
        if news is None:
            news = queue.SimpleQueue()
        result: Future[_T] = Future()
        task: asyncio.Task[_T] | None = None

        def start() -> None:
            nonlocal task
            task = self._loop.create_task(work)
            task.add_done_callback(end)

        def end(done: asyncio.Task[_T]) -> None:
            if done.cancelled():
                result.cancel()
            elif (error := done.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(done.result())
            news.put(None)

        def cancel() -> None:
            if task is not None:
                task.cancel()
            else:
                # interrupted before it was handed over
                work.close()
                news.put(None)

        try:
            # in here, because Ctrl-C may come as soon as the other thread has begun
            self._loop.call_soon_threadsafe(start)
            while (call := news.get()) is not None:
                call()
        except BaseException:
            # Ctrl-C, or a progress bar's own error; a second Ctrl-C does not wait
            try:
                self._loop.call_soon_threadsafe(cancel)
            except RuntimeError:
                work.close()
                raise EngineDeadError("The engine was shut down.") from None
            while news.get() is not None:
                continue
            raise
        return result.result()

    def close(self, last: Callable[[], None]) -> None:
        """Does the last thing on the loop's thread, then ends it. Others whose work is cut off get EngineDeadError from
        the engine that `last` closes."""
        if self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:
            # the garbage collector came by
            last()
            self._loop.stop()
            return
        if not self._thread.is_alive():
            last()  # in a fork, or after the collector's stop
            return
        self.run(_call(last))
        self.run(_settled())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _call(function: Callable[[], None]) -> None:
    function()


async def _settled() -> None:
    """Other work of this loop has heard of the end, and has told those who wait for it."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        await asyncio.wait(others, timeout=1.0)

"""The core in a thread of this process: for LLM, and for AsyncLLM where a second process is not wanted.

The thread builds the core, because torch keeps settings per thread. Messages go in through a queue and come out
through a list; a byte in a socket pair tells the event loop that there is something to fetch. The interpreter runs one
thread at a time, so a busy core delays the event loop; a process of its own does not (that is the default).
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.messages import EngineOutputs, ToClient, ToCore
from quire.processes.arrivals import Arrivals, Bell

if TYPE_CHECKING:
    from quire.engine_client.replica_link import Loss
    from quire.engine_core.driver import CoreDriver

# A step that runs when the engine is closed may finish; a thread cannot be killed.
_CLOSE_SECONDS = 10.0
# One model is loaded at a time: the type that torch gives new tensors belongs to the process.
_BUILDING = threading.Lock()


# Outputs that wait for one in which something ends.
_MOST_KEPT_BACK = 64


def _is_awaited(message: ToClient) -> bool:
    return not isinstance(message, EngineOutputs) or bool(message.ends)


class InThreadLink:
    processes = ()

    def __init__(self, build: Callable[[], CoreDriver]) -> None:
        self._build = build
        self._inbox: queue.SimpleQueue[tuple[ToCore, ...]] = queue.SimpleQueue()
        self._outbox: list[ToClient] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._is_patient: Callable[[], bool] = lambda: False
        self._bell = Bell()
        self._arrivals = Arrivals()
        self._has_arrivals = False
        self._thread = threading.Thread(target=self._run, name="quire-engine-core", daemon=True)
        self._thread.start()

    def send(self, *messages: ToCore) -> None:
        self._inbox.put(messages)
        self._arrivals.ring()
        # last: whoever sees this hushes the bell
        self._has_arrivals = True

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        while not self._is_closing:
            self._bell.hush()
            with self._lock:
                messages = self._outbox
                self._outbox = []
            if messages or timeout == 0:
                return messages
            select.select([self._bell], [], [], timeout)
            timeout = 0 if timeout is not None else None
        return []

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None:
        self._is_patient = is_patient

    def watch_losses(self, tell: Callable[[Loss], None]) -> None: ...

    def descriptors(self) -> tuple[int, ...]:
        return (self._bell.fileno(),)

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self.send()
        self._thread.join(_CLOSE_SECONDS)
        self._arrivals.close()
        self._bell.close()

    def _run(self) -> None:
        from quire.engine_core.driver import failure_at_start

        try:
            with _BUILDING:
                driver = self._build()
        except Exception as error:
            self._post([failure_at_start(error)])
            return
        try:
            driver.core.watch_arrivals(self._arrivals.descriptor)
            while not driver.is_dead and not self._is_closing:
                driver.times.begin()
                self._post(driver.take())
                driver.times.ends("deliver")
                if self._handle_inbox(driver):
                    self._arrivals.hurry(driver.step)
                else:
                    driver.step()
            self._post(driver.take())
        finally:
            driver.shutdown()

    def _handle_inbox(self, driver: CoreDriver) -> bool:
        """All that has come; waits for something if the core has nothing to do. Whether there was anything."""
        has_come = False
        seconds = driver.tend()
        if not driver.has_work:
            with contextlib.suppress(queue.Empty):
                self._handle(driver, self._inbox.get(timeout=seconds))
                has_come = True
        if self._has_arrivals:
            self._has_arrivals = False
            self._arrivals.hush()
        while not self._inbox.empty():
            self._handle(driver, self._inbox.get())
            has_come = True
        return has_come

    def _handle(self, driver: CoreDriver, messages: tuple[ToCore, ...]) -> None:
        driver.times.begin()
        for message in messages:
            driver.handle(message)
        driver.times.ends("receive")

    def _post(self, messages: list[ToClient]) -> None:
        if not messages:
            return
        with self._lock:
            self._outbox += messages
            num_kept = len(self._outbox)
        if num_kept < _MOST_KEPT_BACK and self._is_patient() and not any(map(_is_awaited, messages)):
            return
        self._bell.ring()

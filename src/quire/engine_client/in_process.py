"""The core in this process and this thread: it steps while its client waits for output. For LLM."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from quire.errors import EngineError
from quire.messages import ToClient, ToCore

if TYPE_CHECKING:
    from quire.engine_core.driver import CoreDriver


class InProcessLink:
    """Nothing is encoded and nothing is copied: both sides share the messages."""

    process = None

    def __init__(self, driver: CoreDriver) -> None:
        self._driver: CoreDriver | None = driver
        # At the end of the interpreter too, and before its threads are gone: a core may wait for one of its own.
        self._shut_down = weakref.finalize(self, _shut_down, driver, os.getpid())

    def send(self, message: ToCore) -> None:
        if self._driver is not None:
            self._driver.handle(message)

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        """Steps once, or until there is something to give if `timeout` is None."""
        if self._driver is None:
            raise EngineError("The engine was shut down.")
        messages = self._driver.take()
        while not messages and self._driver.has_work:
            with _interrupt_after():
                self._driver.step()
            messages = self._driver.take()
            if timeout is not None:
                break
        if not messages and timeout is None:
            # Waiting longer would be waiting for ever: nobody else drives this core.
            raise EngineError("The engine core has no work left, but its client waits for output.")
        return messages

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._driver = None
        self._shut_down()


def _shut_down(driver: CoreDriver, owner: int) -> None:
    """A fork of the owner has the core, but none of the threads that would answer it."""
    if os.getpid() == owner:
        driver.shutdown()


@contextmanager
def _interrupt_after() -> Iterator[None]:
    """Ctrl-C waits for the end of the step: one that is broken off half-way leaves tables that contradict each other,
    and the engine is to be of use afterwards. A second Ctrl-C does not wait."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    was_pressed = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            handler(number, frame)
        was_pressed = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if was_pressed:
        handler(signal.SIGINT, None)

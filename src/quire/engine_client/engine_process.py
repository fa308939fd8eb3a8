"""The core's process as a supervisor sees it: its pulse, its stacks, its end by force."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from quire.processes.child_process import is_stopped, processor_seconds, state_of

if TYPE_CHECKING:
    from quire.engine_core.pulse import Pulse, PulsePage

# for the stacks of all threads; a process that cannot write them by then never will
_STACKS_SECONDS = 1.0
_LOOK_SECONDS = 0.02


class EngineProcess:
    """A process and its page. Knows the process by its number only."""

    def __init__(self, pid: int, page: PulsePage) -> None:
        self.pid = pid
        # messages that were handed to it
        self.num_sent = 0
        self._page = page

    @property
    def is_stopped(self) -> bool:
        """By a signal, as the system says."""
        return is_stopped(self.pid)

    @property
    def processor_seconds(self) -> float | None:
        """What it has had so far, where the system says so."""
        return processor_seconds(self.pid)

    def pulse(self) -> Pulse:
        return self._page.read()

    def stacks(self) -> str:
        """What its threads did when it crashed or was asked; empty if it was neither."""
        return self._page.stacks()

    def last_steps(self) -> list[dict[str, Any]]:
        """What its scheduler decided last, oldest first, as numbers."""
        return self._page.last_steps()

    def ask_for_stacks(self) -> str:
        """The stacks after asking. Blocks for up to a second."""
        before = self._page.num_stack_bytes
        state = state_of(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self._page.ask_for_stacks(self.pid)
            # one that was stopped writes nothing until it goes on
            os.kill(self.pid, signal.SIGCONT)
        end = time.monotonic() + _STACKS_SECONDS
        length = before
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            now = self._page.num_stack_bytes
            if now > before and now == length:
                break
            length = now
        return f"state of the process: {state}\n{self._page.stacks(before)}"

    def kill(self) -> None:
        """At once, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            # it leads a group of its own, in which everything is that it started
            os.killpg(self.pid, signal.SIGKILL)

"""A part of a simulation in a process of its own: it begins as a copy of this one, and talks with it over a pipe.

Nothing is told to it that is here already: the trace, engines, prices. It ends when its work is done, when nobody
listens any more, and with this process.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from quire.processes.parent_watch import die_with_parent


class Pipe(Protocol):
    """The other end: objects go both ways. EOFError or OSError: nobody is there any more."""

    def send(self, obj: Any, /) -> None: ...
    def recv(self) -> Any: ...
    def close(self) -> None: ...


# elsewhere libraries do not survive to be copied
CAN_FORK = sys.platform == "linux"


def fork(work: Callable[[Pipe], None]) -> Pipe:
    """Has that done in a copy of this process; both have one end of a pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def begin() -> None:
        die_with_parent()
        # an interrupt is for the process that was started by hand, with which this one ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours.close()
        try:
            work(theirs)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # nobody wants it any more

    with _interrupted_later():
        context.Process(target=begin, daemon=True).start()
    theirs.close()
    return ours


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Libraries have functions that run when a process is copied, and what an interrupt raises in one of them is lost.
    In other threads than the first one it raises nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    come: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: come.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if come:
            signal.raise_signal(signal.SIGINT)

"""What a step of several tokens looks at, to end early when somebody waits for its end.

Owns a bell, and knows files that become readable when a message comes. Rung by whoever hands messages in, and by the
core's loop. Nothing is read here but the bell.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
from collections.abc import Callable


class Bell:
    """A file that can be read from a ring on until it is hushed. Rung by any thread."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        return self._out.fileno()

    def ring(self) -> None:
        # it rings already (its buffer is full), or was closed meanwhile
        with contextlib.suppress(OSError):
            self._in.send(b"!")

    def hush(self) -> None:
        with contextlib.suppress(OSError):
            while self._out.recv(4096):
                pass

    def close(self) -> None:
        self._in.close()
        self._out.close()


class Arrivals(Bell):
    """`descriptor` can be read when the bell rings, or one of the files that are watched can be."""

    def __init__(self) -> None:
        super().__init__()
        # only on Linux there are kernels that compute several tokens in a step
        self._files = select.epoll() if sys.platform == "linux" else None
        # -1: it cannot be had here
        self.descriptor = -1 if self._files is None else self._files.fileno()
        self.watch(self.fileno())

    def watch(self, file: int) -> None:
        if self._files is not None:
            self._files.register(file, select.EPOLLIN)

    def forget(self, file: int) -> None:
        if self._files is not None:
            self._files.unregister(file)

    def hurry(self, step: Callable[[], None]) -> None:
        """Where a message was taken before this step is decided: one that was decided earlier, and runs, ends early."""
        self.ring()
        try:
            step()
        finally:
            self.hush()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        super().close()

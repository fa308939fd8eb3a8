"""A process that Quire has started ends with its parent, whatever the parent ends of."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def watch_parent(folder: str | None = None) -> None:
    """Ends this process when its standard input does: the parent is gone, orderly or not. The folder goes with it."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            # with everything that this process has started: a compiler may be at work
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent-watch", daemon=True).start()


def die_with_parent() -> None:
    """Also when a kernel holds the interpreter: Linux kills this process itself. The thread that started it is kept
    alive by the parent for exactly this reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

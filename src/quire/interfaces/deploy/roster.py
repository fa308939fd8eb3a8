"""Which copies there are, as Ray Serve tells the process of the front. A thread of Serve's tells."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Roster:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._names: frozenset[str] = frozenset()
        self._tell: Callable[[frozenset[str]], None] | None = None

    def change(self, names: frozenset[str]) -> None:
        """Those that take requests from now on."""
        with self._turn:
            self._names = names
            if self._tell is not None:
                self._tell(names)

    def follow(self, tell: Callable[[frozenset[str]], None]) -> None:
        """Has it called at once and at every change, in the thread of the change."""
        with self._turn:
            self._tell = tell
            tell(self._names)


# a process has one front
ROSTER = Roster()

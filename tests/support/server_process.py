"""A server in a process of its own, as a user starts it: found by its URL, ended by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

_URL = re.compile(r"(http://[\w.\[\]:]+)")


class ServerProcess:
    """`with ServerProcess([...]) as server: server.wait_ready()`. Whatever happens, it is gone after the `with`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        num_kept_lines: int | None = None,
    ) -> None:
        """`command`: arguments of the Python interpreter, such as ["-m", "quire.interfaces.cli", "serve"];
        `environment`: what it has besides this process's own; `num_kept_lines`: of its output, by default all."""
        # it finds what this process finds, such as cores of the tests
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self._lines: deque[str] = deque(maxlen=num_kept_lines)
        # characters that were printed and logged so far
        self.num_said = 0
        # nobody reads what is printed after a line that holds this
        self.reads_until: str | None = None
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """Everything that was printed and logged so far."""
        with self._changed:
            return "".join(self._lines)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, text: str, seconds: float = 120.0) -> str:
        """The first line that holds `text`."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(text) or not self._reader.is_alive(), seconds)
            line = self._find(text)
        assert line is not None, f"{text!r} was not said; the process said:\n{self.output}"
        return line

    def wait_ready(self, seconds: float = 120.0) -> str:
        """The URL, once requests are answered."""
        found = _URL.search(self.wait_for("Quire serves", seconds))
        assert found is not None
        return found[1]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """The exit status."""
        status = self._process.wait(seconds)
        self._reader.join(seconds)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.has_ended:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line)
                self.num_said += len(line)
                self._changed.notify_all()
            if self.reads_until is not None and self.reads_until in line:
                return

    def _find(self, text: str) -> str | None:
        return next((line for line in self._lines if text in line), None)

"""A process of Quire that answers questions, one at a time. It may hang, crash or eat memory in the place of others.

Both ways bytes go behind their length. The process starts with the first question, is killed when an answer takes too
long, and the next question starts another. It ends when its standard input does. Blocks; one caller at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

LENGTH_BYTES = 8
# The process imports before it answers for the first time.
_START_SECONDS = 60.0
# It imports from where its parent does.
_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); from PROGRAM import main; main()"
_PART = 1 << 20

Buffer = bytes | bytearray | memoryview


class NotStartedError(Exception):
    """The process does not even answer the first question."""


class AskedProcess:
    """Runs `main` of a module. `first`: what each new process is given and asked before anything else, the last of it
    being a question whose answer nobody reads."""

    def __init__(
        self, program: str, first: Callable[[], Sequence[Buffer]], environment: Mapping[str, str] | None = None
    ) -> None:
        self._program = program
        self._first = first
        self._environment = environment or {}
        self.popen: subprocess.Popen[bytes] | None = None

    def ask(self, question: Sequence[Buffer], seconds: float) -> bytearray:
        """The answer to what stands in these frames. TimeoutError, OSError or EOFError: there is none, and the process
        is gone. NotStartedError: there was none from the beginning."""
        process = self._started()
        try:
            return self._answer(process, question, seconds)
        except (OSError, EOFError):
            self.end()
            raise

    def close(self) -> None:
        """Ends the process, also under a question, which finds its end then."""
        process = self.popen
        if process is not None:
            process.kill()
            process.wait()

    def end(self) -> None:
        process, self.popen = self.popen, None
        if process is None:
            return
        process.kill()
        for file in (process.stdin, process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self.popen is not None and self.popen.poll() is None:
            return self.popen
        self.end()
        first = self._first()
        try:
            process = self.popen = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP.replace("PROGRAM", self._program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(sys.path).encode() + b"\n")
            self._answer(process, first, _START_SECONDS)
        except (OSError, EOFError) as error:
            self.end()
            raise NotStartedError(str(error)) from error
        return process

    def _answer(self, process: subprocess.Popen[bytes], question: Sequence[Buffer], seconds: float) -> bytearray:
        assert process.stdin is not None
        assert process.stdout is not None
        for frame in question:
            write_frame(process.stdin, frame)
        deadline = time.monotonic() + seconds
        length = int.from_bytes(_read(process.stdout, LENGTH_BYTES, deadline), "big")
        return _read(process.stdout, length, deadline)


class AskedProcesses:
    """Up to so many of one kind, for any number of callers: a question goes to one that is idle, or waits."""

    def __init__(self, most: int, make: Callable[[], AskedProcess]) -> None:
        self._make = make
        self._turns = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[AskedProcess] = []
        self._all: list[AskedProcess] = []

    def ask(self, question: Sequence[Buffer], seconds: float) -> bytearray:
        """As AskedProcess.ask; `seconds` begin when its turn has come."""
        with self._turns:
            process = self._take()
            try:
                return process.ask(question, seconds)
            finally:
                with self._lock:
                    self._idle.append(process)

    def _take(self) -> AskedProcess:
        """The one that was used last, so that the others need not be started."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            process = self._make()
            self._all.append(process)
            return process

    def close(self) -> None:
        """Ends them; another question starts another."""
        with self._lock:
            for process in self._all:
                process.close()


def write_frame(file: IO[bytes], data: Buffer) -> None:
    file.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    file.write(data)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes:
    """Nothing where the file has ended."""
    return file.read(int.from_bytes(file.read(LENGTH_BYTES), "big"))


def frames(file: IO[bytes]) -> Iterator[bytes]:
    """Until the file ends."""
    while data := read_frame(file):
        yield data


def _read(file: IO[bytes], num_bytes: int, deadline: float) -> bytearray:
    """So many, or TimeoutError. Another thread never waits for more than a part."""
    data = bytearray(num_bytes)
    readable = select.poll()
    readable.register(file, select.POLLIN)
    count = 0
    while count < num_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not readable.poll(left * 1000):
            raise TimeoutError
        num_read = os.readv(file.fileno(), [memoryview(data)[count : count + _PART]])
        if not num_read:
            raise EOFError("it has ended")
        count += num_read
    return data

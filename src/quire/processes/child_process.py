"""A process of Quire, mostly a core's, as its parent sees it: started, watched and ended here.

A keeper thread starts the process and waits for it until it ends. Linux kills a child together with the *thread* that
started it where the child has asked to die with its parent, so that thread must live as long as the child does. When
the child has ended, the keeper closes a pipe: `end_descriptor` becomes readable within a moment of the death.

The child's standard input stays open as long as the parent lives: its end is how the child learns of the parent's
death on any system.

The child leads a group of processes. Whatever it has started (a compiler, a worker) ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

# The child imports from where its parent does, also where the parent's path was changed by hand or by a test.
_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); from PROGRAM import main; main()"
_TERMINATE_SECONDS = 1.0
_KILL_SECONDS = 1.0
_STDERR = 2


class ChildProcess:
    """Runs `main` of a module with a document for it to read."""

    def __init__(
        self,
        document: bytes,
        arguments: list[str],
        descriptors: tuple[int, ...] = (),
        *,
        program: str = "quire.engine_core.process",
    ) -> None:
        """`descriptors` are open in the child too, under the same numbers."""
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error: OSError | None = None
        self._end_read, self._end_write = os.pipe()
        started = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(document, arguments, descriptors, started), name="quire-engine-keeper", daemon=True
        )
        try:
            self._keeper.start()
        except RuntimeError:
            # the system has no thread to spare
            os.close(self._end_read)
            os.close(self._end_write)
            raise
        started.wait()
        if self._start_error is not None:
            self._release()
            raise self._start_error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def end_descriptor(self) -> int:
        """Readable as soon as the process has ended."""
        return self._end_read

    @property
    def has_ended(self) -> bool:
        return not self._keeper.is_alive()

    def how_it_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None or code >= 0:
            return f"exit status {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def end(self) -> None:
        """Asks the process to end, then makes it. Not to be called in a fork of the owner."""
        process = self._process
        assert process is not None
        if not self.has_ended:
            _signal(process.pid, signal.SIGTERM)
            self._keeper.join(_TERMINATE_SECONDS)
        if not self.has_ended:
            _signal(process.pid, signal.SIGKILL)
            self._keeper.join(_KILL_SECONDS)

    def close(self) -> None:
        """The same, once and for all: nobody may wait for `end_descriptor` any more."""
        self.end()
        self._release()

    def _keep(
        self, document: bytes, arguments: list[str], descriptors: tuple[int, ...], started: threading.Event
    ) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP.replace("PROGRAM", self._program), *arguments],
                stdin=subprocess.PIPE,
                # Standard output belongs to the program that uses Quire.
                stdout=_STDERR,
                # Ctrl-C is for the parent, which decides what it means for its requests.
                start_new_session=True,
                pass_fds=descriptors,
            )
        except OSError as error:
            self._start_error = error
            return
        finally:
            started.set()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(sys.path).encode() + b"\n" + document)
            self._process.stdin.flush()
        except OSError:
            # It died before it could read; its end is reported as any other.
            pass
        _wait_for_the_end(self._process.pid)
        _kill_group(self._process.pid)
        self._process.wait()
        os.close(self._end_write)

    def _release(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            # What could not be written is still in its buffer and fails again; the file is closed all the same.
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._start_error is not None:
            os.close(self._end_write)
        os.close(self._end_read)


def _signal(pid: int, number: int) -> None:
    """Not by Popen: it would look whether the process has ended, and let its number go if so."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_for_the_end(pid: int) -> None:
    """The process stays a zombie, so that nobody else can get its number."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _kill_group(pid: int) -> None:
    """What a process has started and not ended. Its number must still be its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# in /proc/PID/stat, counted from the field behind the name
_USER_TICKS, _SYSTEM_TICKS = 11, 12


def state_of(pid: int) -> str:
    """A letter and a word, such as "S (sleeping)"."""
    if sys.platform != "linux":
        return "unknown"
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "gone"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def processor_seconds(pid: int) -> float | None:
    """What a process and its threads have had so far; None where nobody says."""
    if sys.platform != "linux":
        return None
    try:
        # behind the name, in which anything may stand
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """By a signal, until another one lets it go on; a debugger that holds it is something else."""
    return state_of(pid).startswith("T")


def processor_ticks(pid: int) -> int:
    """The processor time that it has had; -1: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])

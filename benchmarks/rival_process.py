"""An engine in a process of its own: it loads once, answers over pipes, and sleeps while others have their turn."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

_END_SECONDS = 20.0


class EngineFailedError(Exception):
    """The process ended, did not answer in time, or answered that it could not."""


class EngineProcess:
    """One driver. Paused processes use no processor at all, whatever their threads are waiting for."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path, priority: int | None) -> None:
        self._words: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=variables,
            cwd=Path(command[1]).parent,
            start_new_session=True,
        )
        self._log = log
        self._rest = b""
        if priority is not None:
            # a session of its own is a scheduling group of its own, where the kernel groups by session
            try:
                Path(f"/proc/{self._process.pid}/autogroup").write_text(str(priority), encoding="ascii")
            except OSError:
                self._words.write(b"autogroup: priority not set\n")

    def wait_ready(self, seconds: float) -> dict[str, Any]:
        return self._answer(seconds)

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise EngineFailedError(f"the process is gone ({self._last_words()})") from None
        return self._answer(seconds)

    def pause(self) -> None:
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def go_on(self) -> None:
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def memory_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    def end(self) -> None:
        """Asks first. Children that outlive it are ended too; they were found before."""
        family = self._family()
        self.go_on()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        _, alive = psutil.wait_procs(family, _END_SECONDS)
        for process in alive:
            process.kill()
        self._process.wait()
        psutil.wait_procs(alive, _END_SECONDS)
        self._words.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise EngineFailedError(f"no answer within {seconds:.0f} s")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise EngineFailedError(f"the process ended ({self._last_words()})")
            self._rest += piece
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailedError(answer["error"])
        return answer

    def _family(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

"""Compilers as processes of ours: what they say when they fail, where they write, and that they end with us.

A compiler starts others, which go on when this process is killed: for a minute, with files that nobody removes. So a
shell beside them reads from a pipe that only this process holds open, and kills the group of processes when it ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


class BuildError(Exception):
    """Why there are no C++ kernels on this machine, in words for the log."""


def run(command: Sequence[str], scratch: Path | None = None) -> str:
    """What it prints; its temporary files go to `scratch`."""
    environment = {**os.environ, "TMPDIR": str(scratch)} if scratch is not None else None
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0] if lines else 'no message'}") from error
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def ending_with_us() -> Iterator[None]:
    """Inside, everything that this process has started ends when it is killed. Only where it leads a group of its own,
    as an engine does: a group that others have made is not ours to end."""
    if os.getpgrp() != os.getpid():
        yield
        return
    with subprocess.Popen(["/bin/sh", "-c", "read _; kill -9 0"], stdin=subprocess.PIPE) as shell:
        try:
            yield
        finally:
            shell.kill()

"""The kernel's word for what a process does."""

from __future__ import annotations

import sys
from pathlib import Path


def state_of(pid: int) -> str:
    """A letter and a word, such as "S (sleeping)"."""
    if sys.platform != "linux":
        return "unknown"
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "gone"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def is_stopped(pid: int) -> bool:
    """By a signal, until another one lets it go on; a debugger that holds it is something else."""
    return state_of(pid).startswith("T")

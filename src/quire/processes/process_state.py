"""The kernel's word for what a process does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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

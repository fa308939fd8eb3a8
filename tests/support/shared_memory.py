"""Files in /dev/shm, and whose they are: a file there outlives whoever made it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_MAPPED = re.compile(rf"{_FOLDER}/(.+?)(?: \(deleted\))?$", re.MULTILINE)


def shared_files(pids: Collection[int] = ()) -> frozenset[str]:
    """Names of those that belong to these processes or to none: this user's, without those that another process has
    mapped or open."""
    found = {name for name in os.listdir(_FOLDER) if _is_mine(name)} if _FOLDER.is_dir() else set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()) if found else ():
        if pid not in pids:
            found -= _held_by(pid)
    return frozenset(found)


def _is_mine(name: str) -> bool:
    # it may be gone by now
    with suppress(OSError):
        return (_FOLDER / name).stat().st_uid == os.getuid()
    return False


def _held_by(pid: int) -> set[str]:
    held: set[str] = set()
    # processes end, and not all of them may be looked into
    with suppress(OSError):
        held |= set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")))
    with suppress(OSError):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                held |= set(_MAPPED.findall(os.readlink(link.path)))
    return held

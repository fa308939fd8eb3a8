"""The folder of what is made once and used at every start: compiled kernels, packed weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """QUIRE_CACHE_DIR, or `quire` in the user's cache. Raises OSError for a user who has no home."""
    if folder := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise FileNotFoundError("this user has no home: set QUIRE_CACHE_DIR to a folder of its own")
    return Path(cache) / "quire"


def check_private(folder: Path) -> None:
    """Raises OSError if somebody else may write there: what lies there is trusted."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise PermissionError(
            f"{folder} can be written by others than its owner, and what lies there is run: chmod 700 {folder}, or set "
            "QUIRE_CACHE_DIR to a folder of your own"
        )

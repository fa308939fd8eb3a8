"""The folder of what is made once and used at every start: compiled kernels, packed weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """QUIRE_CACHE_DIR, or `quire` in the user's cache."""
    if folder := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def check_private(folder: Path) -> None:
    """Raises OSError if somebody else may write there: what lies there is trusted."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} is not private to this user; set QUIRE_CACHE_DIR to a folder that is")

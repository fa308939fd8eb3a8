"""Where the server keeps what outlives it, unless options say otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import OptionError

_SQLITE = "sqlite:///"


def data_folder() -> Path:
    """The user's own."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    if data.startswith("~"):
        raise OptionError("storage_url: this user has no home. Name a file, such as sqlite:////var/lib/quire.db.")
    return Path(data) / "quire"


def files_beside(storage_url: str | None) -> str | None:
    """The folder of files that belongs to a database; None where the database ends with the server."""
    if storage_url is None:
        return str(data_folder() / "server-files")
    if not storage_url.startswith(_SQLITE):
        # a database elsewhere: its server's disk is not this one's
        return str(data_folder() / "files")
    path = storage_url.removeprefix(_SQLITE).partition("?")[0]
    if path in ("", ":memory:"):
        return None
    return str(Path(path).with_suffix("")) + "-files"


def marker_of(folder: Path) -> Path:
    """Holds something while batches are open, and is locked while a process runs them."""
    return folder / "open-batches"

"""Quire with its embedded model, for one run: what it stores is gone with it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.server_process import ServerProcess


@contextlib.contextmanager
def own_server(key: str, *arguments: str) -> Iterator[tuple[ServerProcess, str]]:
    """The server, which may still be starting, and its key."""
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{Path(folder) / 'stored.db'}"
        command = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--api-key", key, "--storage-url", storage]
        with ServerProcess([*command, *arguments]) as server:
            yield server, key

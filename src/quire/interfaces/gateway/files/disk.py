"""The bytes of files: one private folder, one file an id. Ids are the server's own, so no name of a client is a path.

What is being written stands under a name of its own until it is whole; what a crash left of it
goes at a start an hour later.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import OptionError
from quire.interfaces.gateway.storage.full_disk import is_full, no_room
from quire.interfaces.server.wire.errors import RETRY_SOON, ApiError

logger = logging.getLogger("quire.server")

_ID = re.compile(r"file-[0-9a-f]{32}")
_UNFINISHED = ".part"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def is_file_id(text: str) -> bool:
    return bool(_ID.fullmatch(text))


def check_folder(name: str) -> None:
    """Makes the folder that an option names, and writes there. Raises OptionError where nothing can be stored."""
    path = Path(os.path.expanduser(name))
    try:
        _make_private(path)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise OptionError(
            f"files_folder={name}: nothing can be stored there ({error.strerror}). Give a folder that this user may "
            "write to, or leave it out: then files lie beside the database of storage_url."
        ) from None


def _make_private(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    # it may have been made by somebody else, with other rights
    path.chmod(0o700)


class FileFolder:
    """Owns the folder. Methods block: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with storing():
            _make_private(path)

    def path_of(self, file_id: str) -> Path:
        """Where its bytes are, whether or not they are there."""
        if not is_file_id(file_id):
            raise ValueError(f"{file_id[:80]!r} is no id of a file")
        return self._path / file_id

    def begin(self) -> NewFile:
        return NewFile(self._path / f"{secrets.token_hex(16)}{_UNFINISHED}")

    def keep(self, new: NewFile, file_id: str) -> None:
        """What was written is the file of this id from here on, also after a loss of power."""
        with storing():
            new.finish()
            new.path.rename(self.path_of(file_id))

    def remove(self, file_id: str) -> None:
        self.path_of(file_id).unlink(missing_ok=True)

    def sweep(self, known: Collection[str], before: float) -> None:
        """Removes what an interrupted write or removal has left that was last written `before` (Unix seconds): what
        is younger may be an upload of this server, or of another one on the same storage. Foreign names stay."""
        for entry in os.scandir(self._path):
            is_lost = is_file_id(entry.name) and entry.name not in known
            if not (is_lost or entry.name.endswith(_UNFINISHED)) or not entry.is_file(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_mtime < before:
                logger.info("removing %s, which an interrupted run has left", entry.name)
                os.unlink(entry.path)


class NewFile:
    """A file that is being written. One that is not kept is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        with storing():
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        with storing():
            write_all(self._descriptor, data)
        self.num_bytes += len(data)

    def finish(self) -> None:
        os.fsync(self._descriptor)
        self._close()

    def drop(self) -> None:
        """Without effect on one that was kept."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_all(descriptor: int, data: bytes) -> None:
    """`os.write` may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def storing() -> Iterator[None]:
    """A disk that takes nothing is an answer, and the server goes on."""
    try:
        yield
    except OSError as error:
        logger.error("a file cannot be stored: %s", error)
        if is_full(error):
            raise no_room() from None
        text = "The server cannot write to its disk, nothing was stored. Its log says why."
        raise ApiError(503, text, type="server_error", code="storage_unavailable", headers=RETRY_SOON) from None

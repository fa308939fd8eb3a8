"""From `storage_url` to a database that is safe to share with other processes, and readable by its owner alone."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.pool import StaticPool

from quire.errors import OptionError
from quire.interfaces.gateway.storage.data_folder import data_folder
from quire.interfaces.gateway.storage.full_disk import is_full

_BUSY_MILLISECONDS = 5_000
_CONNECT_SECONDS = 5
# WAL: readers and a writer do not wait for each other; NORMAL: what was said to be stored survives the process, and
# the file is whole after a loss of power. secure_delete: what is deleted is overwritten, and the file shrinks.
_PRAGMAS = (
    f"busy_timeout = {_BUSY_MILLISECONDS}",
    "auto_vacuum = INCREMENTAL",
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "secure_delete = ON",
)


class StorageError(OptionError):
    """The database cannot be used: as the option says, or not now."""


class StorageFullError(StorageError):
    """The database has no room; what it holds can be read."""


def default_url() -> str:
    """A file in the user's data folder."""
    return f"sqlite:///{data_folder() / 'server.db'}"


def connect(url: str) -> sa.Engine:
    """Connects at its first use. Raises StorageError for an address that can never work."""
    try:
        address = sa.make_url(url)
        if address.get_backend_name() == "sqlite":
            return _sqlite(address)
        options = {"connect_timeout": _CONNECT_SECONDS} if address.get_backend_name() == "postgresql" else {}
        return sa.create_engine(address, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=options)
    except ModuleNotFoundError as error:
        extra = ' (pip install "quire[postgresql]")' if error.name in ("psycopg", "psycopg2") else ""
        raise storage_error(url, f"the Python package {error.name} is needed for it and not installed{extra}") from None
    except (exc.ArgumentError, ValueError):
        raise StorageError(
            f"storage_url={shown(url)}: this is no URL of a database that can be used here. Give one such as "
            "sqlite:////srv/quire/server.db or postgresql+psycopg://user@host/name, or leave it out: then a file in "
            "the user's data folder is used."
        ) from None
    except OSError as error:
        raise storage_error(url, error) from None


def _sqlite(address: sa.URL) -> sa.Engine:
    if address.database and address.database != ":memory:" and not address.database.startswith("file:"):
        _create_file(Path(address.database))
    # one connection for good: a database in memory lives as long as it does
    engine = sa.create_engine(address, poolclass=StaticPool, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _create_file(path: Path) -> None:
    """For its owner alone, from the first moment; the files that SQLite puts beside it get the same rights."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def erase_traces(engine: sa.Engine) -> None:
    """After rows were deleted: their bytes leave the journal, and their room the file."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        sqlite = connection.connection.driver_connection
        assert isinstance(sqlite, sqlite3.Connection)
        # a script: the vacuum gives back a page a step, and only a script is stepped to its end
        sqlite.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")


def storage_error(url: str, cause: BaseException | str) -> StorageError:
    """Says which database and why, without its password."""
    if isinstance(cause, exc.DBAPIError):
        cause = cause.orig or cause
    kind = f"{type(cause).__name__}: " if isinstance(cause, sqlite3.Error) else ""
    text = " ".join(str(cause).split()).rstrip(".")
    is_room_over = isinstance(cause, BaseException) and is_full(cause)
    return (StorageFullError if is_room_over else StorageError)(
        f"storage_url={shown(url)}: cannot be used: {kind}{text}."
    )


def shown(url: str) -> str:
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except (exc.ArgumentError, ValueError):
        # whatever it is, a password may be in it, behind a colon
        beginning = url.partition(":")[0][:20]
        return beginning if beginning == url else f"{beginning}..."

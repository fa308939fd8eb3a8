"""A disk without room: one test for it, whoever was writing, and one answer, which is 507."""

from __future__ import annotations

import errno
import sqlite3

from quire.interfaces.server.wire.errors import ApiError

_OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# the second one: no room for the index that the processes of a database share
_OF_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_OF_POSTGRESQL = "53100"


def is_full(error: BaseException) -> bool:
    """Whether this failure of a file or of a database says so."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) in _OF_SQLITE
    return (isinstance(error, OSError) and error.errno in _OF_FILES) or (
        getattr(error, "sqlstate", None) == _OF_POSTGRESQL
    )


def no_room() -> ApiError:
    """The official clients repeat a request after any 5xx, unless they are told not to: this one would fail again."""
    text = (
        "The disk of the server's storage is full, nothing was stored. Delete what is no longer needed, or send the "
        "request with store=false where it has this field."
    )
    headers = {"x-should-retry": "false"}
    return ApiError(507, text, type="server_error", code="insufficient_storage", headers=headers)

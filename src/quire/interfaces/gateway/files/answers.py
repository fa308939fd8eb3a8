"""What /v1/files answers with: OpenAI's objects; and how long a file is kept, as `expires_after` says it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.wire.errors import invalid


class FileObject(msgspec.Struct, kw_only=True):
    """What is known of a file."""

    id: str
    object: Annotated[str, only("file")] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    # as the client wrote it; data, never a path
    filename: str
    purpose: str
    status: Annotated[str, only("processed")] = "processed"
    status_details: None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: Annotated[str, only("list")] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """A file that is gone."""

    id: str
    object: Annotated[str, only("file")] = "file"
    deleted: bool = True


_LEAST_SECONDS = 3_600
_MOST_SECONDS = 2_592_000


def checked_lifetime(anchor: str | None, seconds: int, name: str) -> int:
    """Seconds from the creation on. `name` is the field's."""
    if anchor != "created_at":
        raise invalid(f"{name}.anchor: must be created_at.", name)
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        text = f"{name}.seconds={seconds}: must be between {_LEAST_SECONDS} (an hour) and {_MOST_SECONDS} (30 days)."
        raise invalid(text, name)
    return seconds

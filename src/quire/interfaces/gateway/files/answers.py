"""What /v1/files answers with: OpenAI's objects."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.interfaces.server.openai.responses import only


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

"""What /v1/sessions answers with. Turns answer as chats and completions do."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.interfaces.server.openai.responses import only


class TurnObject(msgspec.Struct, kw_only=True):
    """How long the session was after a turn."""

    num_tokens: int


class SessionObject(msgspec.Struct, kw_only=True):
    """What a session holds."""

    id: str
    object: Annotated[str, only("session")] = "session"
    created_at: int
    # "idle" or "busy": in the middle of a turn
    status: str
    # "chat" or "text", from the first turn on
    kind: str | None
    num_tokens: int
    num_turns: int
    # shared ones count in each session; none where memory was short, and before the first turn
    num_blocks: int
    turns: list[TurnObject]
    forked_from: str | None
    age_seconds: float
    expires_in_seconds: float


class SessionList(msgspec.Struct, kw_only=True):
    """All open sessions, oldest first."""

    object: Annotated[str, only("list")] = "list"
    data: list[SessionObject]


class SessionDeleted(msgspec.Struct, kw_only=True):
    """A session that is closed."""

    id: str
    object: Annotated[str, only("session.deleted")] = "session.deleted"
    deleted: bool = True

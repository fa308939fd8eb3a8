"""/v1/sessions: open, look at, fork, rewind, close. Turns have a file of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Request, Response

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway.sessions.kept_session import KeptSession
from quire.interfaces.gateway.sessions.requests import (
    FORK_RULES,
    OPEN_RULES,
    REWIND_RULES,
    ForkRequest,
    RewindRequest,
    SessionRequest,
)
from quire.interfaces.server.access.caller import tenant_of
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer

if TYPE_CHECKING:
    from quire.interfaces.gateway.sessions.registry import Sessions

router = APIRouter()
PATH = "/v1/sessions"


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


def sessions_of(request: Request) -> Sessions:
    """Those of the application that the request came to."""
    found: Sessions = request.app.state.services.sessions
    return found


@router.post(
    PATH,
    openapi_extra=described(request=SessionRequest, is_optional=True, answer=SessionObject, status=201, errors=(429,)),
)
async def open_session(request: Request) -> Response:
    """An empty session; its first turn decides whether it is a chat or a text."""
    body = await read_request(request, SessionRequest, OPEN_RULES, strict=True, is_optional=True)
    kept = await sessions_of(request).open(tenant_of(), body.cache_salt or "")
    return json_answer(await _shown(request, kept), status=201)


@router.get(PATH, openapi_extra=described(answer=SessionList))
async def list_sessions(request: Request) -> Response:
    """The open sessions of whoever asks, oldest first."""
    sessions = sessions_of(request)
    blocks = await _blocks_by_handle(request.app.state.serving.engine)
    data = [_object(sessions, kept, blocks) for kept in sessions.of(tenant_of())]
    return json_answer(SessionList(data=data))


@router.get(PATH + "/{session_id}", openapi_extra=described(answer=SessionObject))
async def retrieve_session(request: Request, session_id: str) -> Response:
    """What one session holds."""
    return json_answer(await _shown(request, sessions_of(request).find(session_id, tenant_of())))


@router.post(PATH + "/{session_id}/fork", openapi_extra=described(answer=SessionObject, status=201, errors=(409, 429)))
async def fork_session(request: Request, session_id: str) -> Response:
    """A second session with the same past, which shares its blocks."""
    await read_request(request, ForkRequest, FORK_RULES, strict=True, is_optional=True)
    sessions = sessions_of(request)
    fork = await sessions.fork(sessions.find(session_id, tenant_of()))
    return json_answer(await _shown(request, fork), status=201)


@router.post(
    PATH + "/{session_id}/rewind",
    openapi_extra=described(request=RewindRequest, answer=SessionObject, errors=(409,)),
)
async def rewind_session(request: Request, session_id: str) -> Response:
    """Forgets what was said after a turn, or after a number of tokens."""
    sessions = sessions_of(request)
    kept = sessions.find(session_id, tenant_of())
    body = await read_request(request, RewindRequest, REWIND_RULES, strict=True)
    await sessions.rewind(kept, body.num_turns, body.num_tokens)
    return json_answer(await _shown(request, kept))


@router.delete(PATH + "/{session_id}", openapi_extra=described(answer=SessionDeleted))
async def close_session(request: Request, session_id: str) -> Response:
    """Gives its memory back; a turn in flight is aborted."""
    sessions = sessions_of(request)
    await sessions.close(sessions.find(session_id, tenant_of()))
    return json_answer(SessionDeleted(id=session_id))


async def _shown(request: Request, kept: KeptSession) -> SessionObject:
    return _object(sessions_of(request), kept, await _blocks_by_handle(request.app.state.serving.engine))


async def _blocks_by_handle(engine: AsyncLLM) -> dict[str, int]:
    return {entry["handle"]: entry["num_blocks"] for entry in await engine.control("list_kept")}


def _object(sessions: Sessions, kept: KeptSession, blocks: dict[str, int]) -> SessionObject:
    left = kept.used + sessions.idle_seconds - sessions.now
    return SessionObject(
        id=kept.id,
        created_at=kept.created_at,
        status="busy" if kept.is_busy else "idle",
        kind=kept.kind,
        num_tokens=kept.num_tokens,
        num_turns=len(kept.turns),
        num_blocks=blocks.get(kept.engine_session.handle, 0),
        turns=[TurnObject(num_tokens=turn.num_tokens) for turn in kept.turns],
        forked_from=kept.forked_from,
        age_seconds=round(sessions.now - kept.created, 3),
        expires_in_seconds=round(max(0.0, left), 3),
    )

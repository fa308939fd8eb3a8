"""/v1/admin/*: what whoever runs the server may do to it while it runs. Pinned prefixes have a file of their own."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.access.in_flight import ended_by_administrator
from quire.interfaces.server.observing.observe_answers import ObservedMemory
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.serving import Readiness, Serving
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter(dependencies=[Depends(admins_only)])
_LEVELS = ("debug", "info", "warning", "error")
_ROOT = "quire"


class CacheReset(msgspec.Struct, kw_only=True):
    """The prefix cache is empty."""

    object: Annotated[str, only("prefix_cache.reset")] = "prefix_cache.reset"
    reset: bool = True


class RequestAborted(msgspec.Struct, kw_only=True):
    """Requests of this id were ended."""

    object: Annotated[str, only("request.aborted")] = "request.aborted"
    request_id: str
    num_aborted: int


class LogLevelRequest(msgspec.Struct, kw_only=True):
    """PUT /v1/admin/log_level."""

    level: Annotated[str, Meta(description="debug, info, warning or error")]


class LogLevel(msgspec.Struct, kw_only=True):
    """The least level that is logged."""

    object: Annotated[str, only("log_level")] = "log_level"
    level: str


_LEVEL_RULES = FieldRules(LogLevelRequest, {})


@router.post("/v1/admin/reset_prefix_cache", openapi_extra=described(answer=CacheReset))
async def reset_prefix_cache(request: Request) -> Response:
    """Forgets what nobody holds: later prompts are computed anew. Pinned prefixes and running requests stay."""
    await request.app.state.serving.engine.control("reset_prefix_cache")
    return json_answer(CacheReset())


@router.post("/v1/admin/requests/{request_id}/abort", openapi_extra=described(answer=RequestAborted))
async def abort_request(request: Request, request_id: str) -> Response:
    """Ends the requests whose answers bear this x-request-id; their clients get an error."""
    state = request.app.state
    num_aborted = state.in_flight.interrupt(request_id, ended_by_administrator(), "administrator")
    num_aborted += sum(await state.siblings.ask("abort", request_id=request_id))
    if not num_aborted:
        raise ApiError(
            404,
            f"request_id={request_id[:128]!r}: no request of this id is in flight. It is the header x-request-id of "
            "its answer, and stands in the access log.",
            param="request_id",
            code="request_not_found",
        )
    return json_answer(RequestAborted(request_id=request_id, num_aborted=num_aborted))


@router.get("/v1/admin/log_level", openapi_extra=described(answer=LogLevel))
async def log_level(request: Request) -> Response:
    """The least level that is logged."""
    return json_answer(_shown_level())


@router.put("/v1/admin/log_level", openapi_extra=described(request=LogLevelRequest, answer=LogLevel))
async def set_log_level(request: Request) -> Response:
    """Changes it until the server ends. An engine that loads hears of it when it is there."""
    body = await read_request(request, LogLevelRequest, _LEVEL_RULES, strict=True)
    if body.level not in _LEVELS:
        raise invalid(f"level: {body.level[:40]!r} must be one of {', '.join(_LEVELS)}.", "level")
    state = request.app.state
    serving: Serving = state.serving
    level = body.level.upper()
    state.log_level.change(level, serving.engine if serving.readiness is Readiness.READY else None)
    # one that starts later takes the level of whoever starts it
    await state.siblings.ask("log_level", level=level)
    return json_answer(_shown_level())


def _shown_level() -> LogLevel:
    level = logging.getLogger(_ROOT).getEffectiveLevel()
    return LogLevel(level=logging.getLevelName(level).lower())


class Memory(ObservedMemory, kw_only=True):
    """GET /v1/admin/memory: a MemoryAccount."""

    object: Annotated[str, only("memory")] = "memory"


@router.get("/v1/admin/memory", openapi_extra=described(answer=Memory))
async def memory(request: Request) -> Response:
    """Slots by what they hold; they add up to the KV cache."""
    account = await request.app.state.serving.engine.memory()
    return json_answer(Memory(**asdict(account)))

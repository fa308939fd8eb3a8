"""Is the process alive, and does it serve? None of these asks the engine, so none waits for it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from quire.interfaces.server.serving import Readiness
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import unavailable
from quire.interfaces.server.wire.json_answer import json_answer
from quire.version import __version__

router = APIRouter()


class Health(msgspec.Struct):
    """An answer of a server that is well."""

    status: Annotated[str, Meta(extra_json_schema={"enum": ["ready", "alive", "started"]})]


class Load(msgspec.Struct):
    """GET /load."""

    server_load: Annotated[int, Meta(description="requests that this process is answering")]


class Version(msgspec.Struct):
    """GET /version."""

    version: str


@router.get("/ping", name="ping", openapi_extra=described(answer=Health))
@router.post("/ping", name="ping_by_post", openapi_extra=described(answer=Health))
@router.get("/health", name="health", openapi_extra=described(answer=Health))
@router.get("/health/ready", openapi_extra=described(answer=Health))
async def ready(request: Request) -> Response:
    """200 if requests are answered; 503 while the engine loads, stands still or is started again, and
    while the server stops."""
    request.app.state.serving.check_progress()
    return json_answer(Health(Readiness.READY.value))


@router.get("/health/live", openapi_extra=described(answer=Health))
async def live() -> Response:
    """200 as long as the process answers at all."""
    return json_answer(Health("alive"))


@router.get("/health/startup", openapi_extra=described(answer=Health))
async def startup(request: Request) -> Response:
    """200 once the model was loaded, whatever became of it since; 503 before."""
    if not request.app.state.serving.has_started:
        raise unavailable(f"Not started: {Readiness.STARTING.value}.")
    return json_answer(Health("started"))


@router.get("/load", openapi_extra=described(answer=Load))
async def load(request: Request) -> Response:
    """vLLM's: how many requests are being answered."""
    # this one is among them
    return json_answer(Load(len(request.app.state.in_flight) - 1))


@router.get("/version", openapi_extra=described(answer=Version))
async def version() -> Response:
    """Quire's version."""
    return json_answer(Version(__version__))

"""Is the process alive, and does it serve? None of these asks the engine, so none waits for it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.interfaces.server.json_answer import json_answer
from quire.interfaces.server.state import Readiness, state_of
from quire.version import __version__

router = APIRouter()
# Answered without a key, and at any time.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/version"})


@router.head("/health", include_in_schema=False)
@router.head("/health/ready", include_in_schema=False)
@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 if requests are answered; 503 while loading, stopping, or after the engine has died."""
    state = state_of(request)
    state.check_ready()
    return json_answer({"status": Readiness.READY.value})


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live")
async def live() -> Response:
    """200 as long as the process answers at all."""
    return json_answer({"status": "alive"})


@router.get("/version")
async def version() -> Response:
    """Quire's version."""
    return json_answer({"version": __version__})

"""GET /v1/admin/memory: where every slot of the KV cache is."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from quire.interfaces.server.json_answer import json_answer
from quire.interfaces.server.state import state_of

router = APIRouter()


@router.get("/v1/admin/memory")
async def memory(request: Request) -> Response:
    """Slots by what they hold; they add up to the KV cache."""
    account = await state_of(request).engine.memory()
    return json_answer({"object": "memory", **asdict(account)})

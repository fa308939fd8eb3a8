"""GET /v1/admin/memory: where every slot of the KV cache is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.observing.observe_answers import ObservedMemory
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.state import state_of
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter(dependencies=[Depends(admins_only)])


class Memory(ObservedMemory, kw_only=True):
    """GET /v1/admin/memory: a MemoryAccount."""

    object: Annotated[str, only("memory")] = "memory"


@router.get("/v1/admin/memory", openapi_extra=described(answer=Memory))
async def memory(request: Request) -> Response:
    """Slots by what they hold; they add up to the KV cache."""
    account = await state_of(request).engine.memory()
    return json_answer(Memory(**asdict(account)))

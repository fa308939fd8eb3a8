"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.interfaces.server.json_answer import json_answer
from quire.interfaces.server.state import ServerState, state_of

router = APIRouter()


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "max_model_len": state.max_model_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The served model."""
    return json_answer({"object": "list", "data": [_model(state_of(request))]})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One model by its name, which may hold slashes."""
    state = state_of(request)
    state.check_model(model_id)
    return json_answer(_model(state))

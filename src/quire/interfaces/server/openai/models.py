"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response

from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.served_model import Models
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter()


class Model(msgspec.Struct, kw_only=True):
    """A model that requests may name."""

    id: str
    object: Annotated[str, only("model")] = "model"
    created: int
    owned_by: str = "quire"
    # prompt and answer together, in tokens
    max_model_len: int
    # chats are answered, and not texts alone
    has_chat_template: bool
    # of an adapter: the model that it changes
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """GET /v1/models."""

    object: Annotated[str, only("list")] = "list"
    data: list[Model]


def _model(models: Models, name: str) -> Model:
    own = models.own
    return Model(
        id=name,
        created=models.created,
        max_model_len=own.max_model_len,
        has_chat_template=own.renderer.has_chat_template,
        parent=None if name == own.name else own.name,
    )


@router.get("/v1/models", openapi_extra=described(answer=ModelList))
async def list_models(request: Request) -> Response:
    """The served model, and its adapters."""
    models: Models = request.app.state.models
    own = models.own
    names = [own.name]
    if own.engine.config.worker.max_loras:
        names += [adapter.name for adapter in await own.engine.adapters()]
    return json_answer(ModelList(data=[_model(models, name) for name in names]))


@router.get("/v1/models/{model_id:path}", openapi_extra=described(answer=Model))
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One model by its name, which may hold slashes."""
    models: Models = request.app.state.models
    await models.named(model_id)
    return json_answer(_model(models, model_id))

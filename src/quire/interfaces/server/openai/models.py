"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response

from quire.interfaces.adapters import Adapter
from quire.interfaces.server.access.caller import current_caller
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
    # prompt and answer together, in tokens; null of a model that is not loaded
    max_model_len: int | None
    # chats are answered, and not texts alone
    has_chat_template: bool | None
    # in the messages of a chat
    takes_images: bool | None
    # text, transcripts, labels (and scores), vectors
    makes: str | None
    # what this one stands for: the name of the model, or of an adapter; to whoever may load adapters, its folder
    root: str
    # of an adapter: the model that it changes
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """GET /v1/models."""

    object: Annotated[str, only("list")] = "list"
    data: list[Model]


def _model(models: Models, name: str, adapter: Adapter | None = None) -> Model:
    own = models.own
    return Model(
        id=name,
        created=models.created,
        max_model_len=own.max_model_len,
        has_chat_template=own.renderer.has_chat_template,
        takes_images=own.renderer.sees_images,
        makes=own.engine.config.facts.makes,
        root=own.name if adapter is None else _root_of(adapter),
        parent=None if adapter is None else own.name,
    )


def _root_of(adapter: Adapter) -> str:
    return adapter.path if current_caller().is_admin else adapter.name


def _further(models: Models, name: str, root: str) -> Model:
    """One that is loaded on demand, and not for this."""
    engine = models.further.loaded.get(root)
    return Model(
        id=name,
        created=models.created,
        max_model_len=None if engine is None else engine.ready.max_model_len,
        has_chat_template=None if engine is None else engine.renderer.has_chat_template,
        takes_images=None if engine is None else engine.renderer.sees_images,
        makes=None if engine is None else engine.config.facts.makes,
        root=root,
    )


@router.get("/v1/models", openapi_extra=described(answer=ModelList))
async def list_models(request: Request) -> Response:
    """The served model, its adapters, and those that are loaded on demand."""
    models: Models = request.app.state.models
    own = models.own
    data = [_model(models, name) for name in own.engine.config.served_model_names]
    if own.engine.config.worker.max_loras:
        data += [_model(models, adapter.name, adapter) for adapter in await own.engine.adapters()]
    data += [_further(models, name, name) for name in models.further.names]
    return json_answer(ModelList(data=data))


@router.get("/v1/models/{model_id:path}", openapi_extra=described(answer=Model))
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One model by its name, which may hold slashes."""
    models: Models = request.app.state.models
    further = models.further.find(model_id)
    if further is not None:
        return json_answer(_further(models, model_id, further))
    model = await models.named(model_id)
    return json_answer(_model(models, model_id, model.adapter))

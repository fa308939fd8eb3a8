"""POST /invocations: the one address that a container answers on SageMaker. The fields of a request say which endpoint
it is for."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.interfaces.server.endpoint import Endpoint, respond
from quire.interfaces.server.openai import chat, completions, embeddings, scoring
from quire.interfaces.server.openai.embeddings import EmbeddingRequest
from quire.interfaces.server.openai.requests import ChatRequest
from quire.interfaces.server.request_body import Bodies
from quire.interfaces.server.served_model import Models
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid

router = APIRouter()
# with messages, these ask for the vector of a chat
_OF_VECTORS = frozenset(EmbeddingRequest.__struct_fields__) - frozenset(ChatRequest.__struct_fields__)
# by the field without which nothing is for it
_ENDPOINTS: dict[str, Endpoint[Any]] = {
    "messages": chat.ENDPOINT,
    "prompt": completions.ENDPOINT,
    "input": embeddings.ENDPOINT,
    "documents": scoring.RERANK_ENDPOINT,
    "text_1": scoring.SCORE_ENDPOINT,
}


@router.post("/invocations", openapi_extra=described(errors=(400, 413, 415, 429)))
async def invoke(request: Request) -> Response:
    """A chat, a completion, an embedding, a ranking or scores: messages, prompt, input, documents or text_1. Messages
    beside a field of embeddings, or for a model that generates nothing, become a vector."""
    bodies: Bodies = request.app.state.bodies
    data = await bodies.read_whole(request)
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise invalid("The body must be a JSON object with messages, prompt or input.") from None
    endpoint = next((endpoint for name, endpoint in _ENDPOINTS.items() if name in fields), None)
    if endpoint is chat.ENDPOINT and (_OF_VECTORS & fields.keys() or not _generates(request)):
        endpoint = embeddings.ENDPOINT
    if endpoint is None:
        raise invalid(
            "Give messages for a chat, prompt for a completion, input for embeddings, documents for a ranking, or "
            "text_1 for scores.",
            "messages",
        )
    body = await bodies.read_bytes(data, endpoint.request_type, endpoint.rules)
    answer = await endpoint.answer(body, request.app.state)
    return await respond(request, answer, is_stream=bool(getattr(body, "stream", False)), fold=endpoint.fold)


def _generates(request: Request) -> bool:
    models: Models = request.app.state.models
    return models.own.engine.config.facts.has_head

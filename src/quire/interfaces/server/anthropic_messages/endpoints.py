"""The endpoints of messages."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.datastructures import State

from quire.interfaces.server.anthropic_messages.answer import MessageAnswer
from quire.interfaces.server.anthropic_messages.fields import (
    COUNT_RULES,
    NAMES,
    RULES,
    CountTokensRequest,
    MessagesRequest,
    chat_of,
    hides_thinking,
    thinking_budget,
)
from quire.interfaces.server.anthropic_messages.objects import FailureAnswer, MessageEvent, MessageObject, TokenCount
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.chat import prepare_chat, prepare_chat_that_fits
from quire.interfaces.server.openai.work import count_input
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter()


@router.post(
    "/v1/messages",
    openapi_extra=described(
        request=MessagesRequest,
        answer=MessageObject,
        event=MessageEvent,
        event_words="events `event: TYPE` and `data: JSON`, the last one is message_stop or error",
        error=FailureAnswer,
    ),
)
async def create_message(request: Request) -> Response:
    """Answers a chat in Anthropic's form."""
    return await ENDPOINT.respond(request)


async def _answer(body: MessagesRequest, state: State) -> MessageAnswer:
    model: ServedModel = await state.models.named(body.model)
    with in_words_of(NAMES):
        chat = chat_of(body, sees_images=model.renderer.sees_images)
        budget = thinking_budget(body)
        # clients of this API send one to every model, also to one whose thoughts cannot be counted
        if chat.thinking_token_budget is None and budget is not None and model.renderer.can_count_thoughts:
            chat.thinking_token_budget = budget
        work = await prepare_chat_that_fits(chat, model)
    name = body.model or model.name
    return MessageAnswer(name, work, max_tokens=body.max_tokens, hides_thinking=hides_thinking(body))


ENDPOINT = Endpoint(MessagesRequest, RULES, _answer)


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=described(request=CountTokensRequest, answer=TokenCount, error=FailureAnswer),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a message has."""
    body = await read_request(request, CountTokensRequest, COUNT_RULES)
    model: ServedModel = await request.app.state.models.named(body.model)
    with in_words_of(NAMES):
        chat = chat_of(body, sees_images=model.renderer.sees_images)
        num_tokens = await count_input(prepare_chat(chat, model))
    return json_answer(TokenCount(num_tokens))

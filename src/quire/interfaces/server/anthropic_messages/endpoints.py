"""The endpoints of messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.errors import ContextLengthError
from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.anthropic_messages.answer import PING, MessageInTheMaking
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
from quire.interfaces.server.event_stream import EventStream, StreamDialect
from quire.interfaces.server.openai.dialect import ChatRun
from quire.interfaces.server.openai.requests import ChatRequest
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.state import ServerState, state_of
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import DIALECTS, ApiError, Dialect, in_words_of
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.pumped import pumped

router = APIRouter()


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % failure_body(error.status, error.message)


_STREAM = StreamDialect(keep_alive=PING, closing=b"", error_event=_error_event)


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
    state = state_of(request)
    body = await read_request(request, MessagesRequest, RULES, strict=state.strict)
    state = await state.of_model(body.model)
    with in_words_of(NAMES):
        chat = chat_of(body, sees_images=state.engine.renderer.sees_images)
        budget = thinking_budget(body)
        # clients of this API send one to every model, also to one whose thoughts cannot be counted
        if chat.thinking_token_budget is None and budget is not None and state.engine.renderer.can_count_thoughts:
            chat.thinking_token_budget = budget
        run = await _run_of(chat, state)
    model = body.model or state.model_name
    answer = MessageInTheMaking(model, run, max_tokens=body.max_tokens, hides_thinking=hides_thinking(body))
    if body.stream:
        return EventStream(state.in_flight, pumped(_events(run, answer)), _STREAM)
    return json_answer(await until_disconnect(state.in_flight, request.receive, _whole(run, answer)))


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=described(request=CountTokensRequest, answer=TokenCount, error=FailureAnswer),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a message has."""
    state = state_of(request)
    body = await read_request(request, CountTokensRequest, COUNT_RULES, strict=state.strict)
    state = await state.of_model(body.model)
    with in_words_of(NAMES):
        num_tokens = await ChatRun.count_input(
            ChatRun.prepare(chat_of(body, sees_images=state.engine.renderer.sees_images), state)
        )
    return json_answer(TokenCount(num_tokens))


async def _run_of(chat: ChatRequest, state: ServerState) -> ChatRun:
    """Clients of this API ask for as many tokens as a large model writes; a smaller one writes what it can."""
    try:
        return await ChatRun.prepare(chat, state)
    except ContextLengthError as error:
        if error.param != "max_completion_tokens":
            raise
    return await ChatRun.prepare(msgspec.structs.replace(chat, max_completion_tokens=None), state)


async def _events(run: ChatRun, answer: MessageInTheMaking) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async with aclosing(run.steps()) as steps:
        async for step in steps:
            # only now: a request that fails before is answered with its status
            events = b"" if has_begun else answer.begin(run.usage)
            has_begun = True
            events += answer.step(step)
            if step.finish_reason is not None:
                events += answer.finish(step, run.usage)
            if events:
                yield events


async def _whole(run: ChatRun, answer: MessageInTheMaking) -> dict[str, Any]:
    async with aclosing(_events(run, answer)) as events:
        async for _ in events:
            pass
    return answer.message


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def failure_body(status: int, message: str) -> bytes:
    """{"type": "error", "error": {"type", "message"}}: the type follows from the status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


DIALECTS.append(Dialect("/v1/messages", failure_body, b"request-id"))

"""The endpoints of responses."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import State

from quire.interfaces.server.endpoint import Endpoint, respond
from quire.interfaces.server.openai.work import Work, count_input
from quire.interfaces.server.openai_responses.fields import RULES, ResponsesRequest
from quire.interfaces.server.openai_responses.making import prepare
from quire.interfaces.server.openai_responses.objects import (
    InputTokenCount,
    ResponseEvent,
    ResponseObject,
)
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter()
_EVENTS = "events `event: TYPE` and `data: JSON`, the last one is response.completed, .incomplete or .failed"


@router.post(
    "/v1/responses",
    openapi_extra=described(
        request=ResponsesRequest, answer=ResponseObject, event=ResponseEvent, event_words=_EVENTS, errors=(507,)
    ),
)
async def create_response(request: Request) -> Response:
    """Answers, and keeps the answer unless store is false."""
    body = await read_request(request, ResponsesRequest, RULES)
    answer = await prepare(body, request.app.state)
    if answer.is_background:
        return json_answer(await request.app.state.services.make_in_background(answer))
    return await respond(request, answer, is_stream=bool(body.stream))


ENDPOINT = Endpoint(ResponsesRequest, RULES, prepare)


@router.post("/v1/responses/input_tokens", openapi_extra=described(request=ResponsesRequest, answer=InputTokenCount))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of such a response would have."""
    body = await read_request(request, ResponsesRequest, RULES)
    body = msgspec.structs.replace(body, store=False, background=None)
    return json_answer(InputTokenCount(await count_input(_work_of(body, request.app.state))))


async def _work_of(body: ResponsesRequest, state: State) -> Work:
    return (await prepare(body, state)).work

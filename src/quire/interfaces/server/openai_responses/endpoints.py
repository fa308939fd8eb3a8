"""The endpoints of responses."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.event_stream import EventStream, StreamDialect
from quire.interfaces.server.openai_responses.fields import RULES, ResponsesRequest
from quire.interfaces.server.openai_responses.making import Making
from quire.interfaces.server.openai_responses.objects import (
    InputTokenCount,
    ResponseEvent,
    ResponseObject,
)
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.state import ServerState, state_of, tenant_of
from quire.interfaces.server.whole_answers import WholeAnswers
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.pumped import pumped

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
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, RULES, strict=state.strict)
    making = await _prepared(body, state)
    if making.is_background:
        return json_answer(await state.services.make_in_background(making))
    if body.stream:
        # the last event says all; nobody waits for a [DONE] here
        dialect = StreamDialect(closing=b"", error_event=making.failed)
        return EventStream(state.in_flight, pumped(making.events()), dialect)
    return json_answer(await until_disconnect(state.in_flight, request.receive, making.whole()))


async def _prepared(body: ResponsesRequest, state: ServerState) -> Making:
    state = await state.of_model(body.model)
    return await Making.prepare(body, state, current_caller().name)


WHOLE = WholeAnswers(ResponsesRequest, RULES, _prepared, "output")


@router.post("/v1/responses/input_tokens", openapi_extra=described(request=ResponsesRequest, answer=InputTokenCount))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of such a response would have."""
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, RULES, strict=state.strict)
    state = await state.of_model(body.model)
    num_tokens = await Making.count_input(body, state, tenant_of(request))
    return json_answer(InputTokenCount(num_tokens))

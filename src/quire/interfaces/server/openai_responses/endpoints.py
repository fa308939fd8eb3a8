"""The endpoints of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response

from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.event_stream import EventStream, StreamDialect
from quire.interfaces.server.openai_responses.fields import RULES, ResponsesRequest
from quire.interfaces.server.openai_responses.items import Item
from quire.interfaces.server.openai_responses.making import Making, stored_responses
from quire.interfaces.server.openai_responses.objects import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ResponseEvent,
    ResponseObject,
)
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.state import state_of, tenant_of
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.paging import After, Page, Sorted, ends_of, limited, page_of_list
from quire.interfaces.server.wire.pumped import pumped

if TYPE_CHECKING:
    from quire.interfaces.server.openai_responses.background import BackgroundResponses

router = APIRouter()
_EVENTS = "events `event: TYPE` and `data: JSON`, the last one is response.completed, .incomplete or .failed"


def _background(request: Request) -> BackgroundResponses:
    """Those of the application that the request came to."""
    found: BackgroundResponses = request.app.state.services.background_responses
    return found


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
    state = await state.of_model(body.model)
    making = await Making.prepare(body, state, tenant_of(request))
    if making.is_background:
        return json_answer(await _background(request).start(making))
    if body.stream:
        # the last event says all; nobody waits for a [DONE] here
        dialect = StreamDialect(closing=b"", error_event=making.failed)
        return EventStream(state.in_flight, pumped(making.events()), dialect)
    return json_answer(await until_disconnect(state.in_flight, request.receive, making.whole()))


@router.post("/v1/responses/input_tokens", openapi_extra=described(request=ResponsesRequest, answer=InputTokenCount))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of such a response would have."""
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, RULES, strict=state.strict)
    state = await state.of_model(body.model)
    num_tokens = await Making.count_input(body, state, tenant_of(request))
    return json_answer(InputTokenCount(num_tokens))


@router.get("/v1/responses/{response_id}", openapi_extra=described(answer=ResponseObject, errors=(400,)))
async def get_response(
    request: Request, response_id: str, stream: Annotated[bool, Query(description="refused if true")] = False
) -> Response:
    """A stored response."""
    if stream:
        raise invalid("stream: a stored response is not sent as a stream again. Leave it out.", "stream")
    body = await stored_responses(state_of(request), tenant_of(request)).body(response_id)
    return Response(body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", openapi_extra=described(answer=DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a stored response for good."""
    await stored_responses(state_of(request), tenant_of(request)).delete(response_id)
    _background(request).drop(response_id)
    return json_answer(DeletedResponse(response_id))


@router.post("/v1/responses/{response_id}/cancel", openapi_extra=described(answer=ResponseObject, errors=(400,)))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is made in the background; one that is over stays as it is."""
    body = await _background(request).cancel(response_id, tenant_of(request))
    return Response(body, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items", openapi_extra=described(answer=ItemList))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, limited(100)] = 20,
    order: Sorted = "desc",
    after: After = None,
) -> Response:
    """The items that a stored response was made of, a page at a time."""
    items = await stored_responses(state_of(request), tenant_of(request)).input_items(response_id)
    data, has_more = page_of_list(items, Page(limit, after, order), _id_of)
    first, last = ends_of(data, _id_of)
    return json_answer(ItemList(list(data), first, last, has_more))


def _id_of(item: Item) -> str:
    return str(item["id"])

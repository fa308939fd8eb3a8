"""Responses that are kept, asked for again: GET, DELETE and cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response

from quire.interfaces.server.access.caller import tenant_of
from quire.interfaces.server.openai_responses.items import Item
from quire.interfaces.server.openai_responses.objects import DeletedResponse, ItemList, ResponseObject
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.paging import After, Page, Sorted, ends_of, limited, page_of_list

if TYPE_CHECKING:
    from quire.interfaces.gateway.responses.background import BackgroundResponses
    from quire.interfaces.gateway.responses.stored import StoredResponses

router = APIRouter()


def _background(request: Request) -> BackgroundResponses:
    """Those of the application that the request came to."""
    found: BackgroundResponses = request.app.state.services.background_responses
    return found


def _stored(request: Request) -> StoredResponses:
    """Those of whoever asks."""
    found: StoredResponses = request.app.state.services.stored_responses(tenant_of())
    return found


@router.get("/v1/responses/{response_id}", openapi_extra=described(answer=ResponseObject, errors=(400,)))
async def get_response(
    request: Request, response_id: str, stream: Annotated[bool, Query(description="refused if true")] = False
) -> Response:
    """A stored response."""
    if stream:
        raise invalid("stream: a stored response is not sent as a stream again. Leave it out.", "stream")
    body = await _stored(request).body(response_id)
    return Response(body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", openapi_extra=described(answer=DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a stored response for good."""
    await _stored(request).delete(response_id)
    _background(request).drop(response_id)
    return json_answer(DeletedResponse(response_id))


@router.post("/v1/responses/{response_id}/cancel", openapi_extra=described(answer=ResponseObject, errors=(400,)))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is made in the background; one that is over stays as it is."""
    body = await _background(request).cancel(response_id, tenant_of())
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
    items = await _stored(request).input_items(response_id)
    data, has_more = page_of_list(items, Page(limit, after, order), _id_of)
    first, last = ends_of(data, _id_of)
    return json_answer(ItemList(list(data), first, last, has_more))


def _id_of(item: Item) -> str:
    return str(item["id"])

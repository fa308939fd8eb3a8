"""The endpoints of responses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.interfaces.server.errors import invalid
from quire.interfaces.server.event_stream import EventStream, StreamDialect
from quire.interfaces.server.in_flight import until_disconnect
from quire.interfaces.server.json_answer import json_answer, json_schema_of
from quire.interfaces.server.openai_responses.fields import RULES, ResponsesRequest
from quire.interfaces.server.openai_responses.items import Item
from quire.interfaces.server.openai_responses.making import Making, stored_responses
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.state import state_of, tenant_of

router = APIRouter()
_MOST_ITEMS, _DEFAULT_ITEMS = 100, 20


@router.post("/v1/responses", openapi_extra=json_schema_of(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answers, and keeps the answer unless store is false."""
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, RULES, strict=state.strict)
    state.check_model(body.model)
    making = await Making.prepare(body, state, tenant_of(request))
    if body.stream:
        # the last event says all; nobody waits for a [DONE] here
        dialect = StreamDialect(closing=b"", error_event=making.failed)
        return EventStream(state.in_flight, making.events(), dialect)
    return json_answer(await until_disconnect(state.in_flight, request.receive, making.whole()))


@router.post("/v1/responses/input_tokens", openapi_extra=json_schema_of(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of such a response would have."""
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, RULES, strict=state.strict)
    state.check_model(body.model)
    num_tokens = await Making.count_input(body, state, tenant_of(request))
    return json_answer({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    if request.query_params.get("stream") == "true":
        raise invalid("stream: a stored response is not sent as a stream again. Leave it out.", "stream")
    body = await stored_responses(state_of(request), tenant_of(request)).body(response_id)
    return Response(body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a stored response for good."""
    await stored_responses(state_of(request), tenant_of(request)).delete(response_id)
    return json_answer({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refused: only responses in the background can be cancelled, and none is made there."""
    await stored_responses(state_of(request), tenant_of(request)).body(response_id)
    raise invalid("A response that was not made in the background cannot be cancelled: it is over.", "response_id")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a stored response was made of, a page at a time."""
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    limit = _limit_of(query.get("limit", str(_DEFAULT_ITEMS)))
    if order not in ("asc", "desc"):
        raise invalid(f"order={order[:20]!r}: must be asc or desc.", "order")
    items = await stored_responses(state_of(request), tenant_of(request)).input_items(response_id)
    return json_answer(_page(items if order == "asc" else items[::-1], limit, after))


def _limit_of(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= _MOST_ITEMS:
        raise invalid(f"limit={text[:20]!r}: must be between 1 and {_MOST_ITEMS}.", "limit")
    return int(text)


def _page(items: list[Item], limit: int, after: str | None) -> dict[str, Any]:
    begin = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"after={after[:80]!r}: is none of the items.", "after")
        begin = ids.index(after) + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }

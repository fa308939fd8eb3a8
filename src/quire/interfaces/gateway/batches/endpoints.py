"""POST and GET of /v1/batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Request, Response

from quire.interfaces.gateway.batches.batch import Batch, BatchList
from quire.interfaces.gateway.batches.requests import RULES, BatchRequest
from quire.interfaces.server.access.caller import tenant_of
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.paging import After, Page, ends_of, limited

if TYPE_CHECKING:
    from quire.interfaces.gateway.batches.service import Batches

router = APIRouter()
_PATH = "/v1/batches"
_DEFAULT = 20
_MOST = 100


def _batches(request: Request) -> Batches:
    """Those of the application that the request came to."""
    found: Batches = request.app.state.services.batches
    return found


@router.post(_PATH, openapi_extra=described(request=BatchRequest, answer=Batch, errors=(404, 429, 507)))
async def create_batch(request: Request) -> Response:
    """Begins to run the requests of a file."""
    asked = await read_request(request, BatchRequest, RULES)
    batches = _batches(request)
    asked.check(batches.endpoints)
    return json_answer(await batches.create(asked, tenant_of()))


@router.get(_PATH, openapi_extra=described(answer=BatchList))
async def list_batches(
    request: Request, limit: Annotated[int, limited(_MOST)] = _DEFAULT, after: After = None
) -> Response:
    """The batches of whoever asks, newest first."""
    found, has_more = await _batches(request).page(tenant_of(), Page(limit, after))
    first, last = ends_of(found)
    return json_answer(BatchList(data=found, first_id=first, last_id=last, has_more=has_more))


@router.get(_PATH + "/{batch_id}", openapi_extra=described(answer=Batch))
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """How far one batch is."""
    return json_answer(await _batches(request).find(batch_id, tenant_of()))


@router.post(_PATH + "/{batch_id}/cancel", openapi_extra=described(answer=Batch, errors=(409,)))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends one; what it has brought so far stays."""
    return json_answer(await _batches(request).cancel(batch_id, tenant_of()))

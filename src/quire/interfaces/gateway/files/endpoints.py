"""POST, GET and DELETE of /v1/files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from quire.interfaces.gateway.files.answers import FileDeleted, FileList, FileObject
from quire.interfaces.server.access.caller import tenant_of
from quire.interfaces.server.access.in_flight import InFlight, arriving_within
from quire.interfaces.server.event_stream import give_up
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.paging import After, Page, Sorted, ends_of, limited

if TYPE_CHECKING:
    from quire.interfaces.gateway.files.files import Files

router = APIRouter()
_PATH = "/v1/files"
_MOST = 10_000
_FORM = "the fields file (with a filename), purpose (batch), expires_after[anchor] and expires_after[seconds]"


def _files(request: Request) -> Files:
    """Those of the application that the request came to."""
    found: Files = request.app.state.services.files
    return found


@router.post(
    _PATH,
    openapi_extra=described(answer=FileObject, other_bodies={"multipart/form-data": _FORM}, errors=(408, 507)),
)
async def upload_file(request: Request) -> Response:
    """Stores a file, which is streamed to the disk while it comes."""
    state = request.app.state
    # a server that ends waits for it as for any other request
    with state.in_flight.enter() as ticket, arriving_within(state.max_request_seconds, ticket):
        file = await _files(request).receive(request, tenant_of())
    return json_answer(file)


@router.get(_PATH, openapi_extra=described(answer=FileList))
async def list_files(
    request: Request,
    limit: Annotated[int, limited(_MOST)] = _MOST,
    after: After = None,
    order: Sorted = "desc",
    purpose: Annotated[str | None, Query(description="only files of this purpose")] = None,
) -> Response:
    """The files of whoever asks, newest first."""
    page = Page(limit, after, order)
    found, has_more = await _files(request).page(tenant_of(), purpose, page)
    first, last = ends_of(found)
    return json_answer(FileList(data=found, first_id=first, last_id=last, has_more=has_more))


@router.get(_PATH + "/{file_id}", openapi_extra=described(answer=FileObject))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """What is known of one file."""
    return json_answer(await _files(request).find(file_id, tenant_of()))


@router.get(_PATH + "/{file_id}/content", openapi_extra=described(media_type="application/octet-stream", errors=(416,)))
async def file_content(request: Request, file_id: str) -> Response:
    """The bytes of one file."""
    state = request.app.state
    files = _files(request)
    file = await files.find(file_id, tenant_of())
    return Download(state.in_flight, files.path_of(file.id), file.filename)


@router.delete(_PATH + "/{file_id}", openapi_extra=described(answer=FileDeleted, errors=(409,)))
async def delete_file(request: Request, file_id: str) -> Response:
    """Removes a file, unless a batch reads it."""
    tenant = tenant_of()
    await request.app.state.services.batches.check_unused(file_id, tenant)
    await _files(request).delete(file_id, tenant)
    return json_answer(FileDeleted(id=file_id))


class Download(FileResponse):
    """A file on its way to a client. A server that ends waits for it as for any other request."""

    def __init__(self, in_flight: InFlight, path: Path, filename: str) -> None:
        # bytes of a client: no browser shall take them for a page
        headers = {"x-content-type-options": "nosniff"}
        super().__init__(path, headers=headers, media_type="application/octet-stream", filename=filename)
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = is_whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun, is_whole
            if message["type"] == "http.response.start" and message["status"] >= 400:
                raise _wrong_range(message)
            has_begun = True
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            with self._in_flight.enter() as ticket:
                await super().__call__(scope, receive, send_and_note)
                if not is_whole:
                    # it was told that the client is gone, and says so to nobody
                    ticket.interrupt(ClientGoneError())
                    await asyncio.sleep(0)
        except ClientGoneError:
            scope["client_gone"] = True
        except ApiError:
            if not has_begun:
                raise
            # its time was over: what came is shorter than its head says
            await give_up(scope)


def _wrong_range(start: Message) -> ApiError:
    """What Starlette says of a header `Range`, which is all that it refuses, as every other error is said."""
    headers = {name.decode(): value.decode() for name, value in start["headers"] if name == b"content-range"}
    text = "Range: must be bytes=FIRST-LAST, of bytes that the file has. Leave it out for the whole file."
    return ApiError(start["status"], text, headers=headers)

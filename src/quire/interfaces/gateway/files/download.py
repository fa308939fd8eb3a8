"""A file on its way to a client. A server that ends waits for it as for any other request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.event_stream import give_up
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError


class Download(FileResponse):
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

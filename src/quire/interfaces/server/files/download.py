"""A file on its way to a client. A server that ends waits for it as for any other request."""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.wire.errors import ApiError
from quire.interfaces.server.wire.event_stream import give_up


class Download(FileResponse):
    def __init__(self, in_flight: InFlight, path: Path, filename: str) -> None:
        # bytes of a client: no browser shall take them for a page
        headers = {"x-content-type-options": "nosniff"}
        super().__init__(path, headers=headers, media_type="application/octet-stream", filename=filename)
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start" and message["status"] >= 400:
                raise _wrong_range(message)
            has_begun = True
            await send(message)

        try:
            with self._in_flight.enter():
                await super().__call__(scope, receive, send_and_note)
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

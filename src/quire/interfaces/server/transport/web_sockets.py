"""uvicorn's WebSockets, with a handshake that is refused as a request is: an error object, an id, a line in the log."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from quire.interfaces.server.transport.http_protocol import refused
from quire.interfaces.server.wire.errors import ApiError


class _Handshake(ServerProtocol):
    """The library would answer one that is none with lines of text."""

    client: tuple[str, int] | None = None

    def accept(self, request: Request) -> Response:
        response = super().accept(request)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            return response
        error = refused(ApiError(response.status_code, response.body.decode().splitlines()[0]), self.client)
        body = error.body()
        kept = [one for one in response.headers.raw_items() if not one[0].lower().startswith("content-")]
        ours = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *error.headers.items()]
        return Response(response.status_code, response.reason_phrase, Headers([*kept, *ours]), body)


class WebSockets(WebSocketsSansIOProtocol):
    """One connection."""

    conn: _Handshake

    def __init__(self, config: Config, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        # no extensions: a compressed message could be a thousand times its size
        self.conn = _Handshake(max_size=config.ws_max_size, logger=self.logger)

    def handle_connect(self, event: Request) -> None:
        self.conn.client = self.client
        super().handle_connect(event)

    async def send(self, message: Any) -> None:
        """An HTTP answer ends the handshake as well: else uvicorn logs an error for each client that was refused."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

"""uvicorn's WebSockets, with a handshake that is refused as a request is (an error object, an id, a line in the log),
and with clocks and bounds for what a client may leave undone.

The head of the handshake has been read already, by the parser of all other requests; this one reads frames. A socket
is unfinished (unfinished.py) until its first message is whole. Pieces of a prompt have a clock of their own behind that
(prompt_pieces.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request, Response
from websockets.protocol import Protocol, State
from websockets.server import ServerProtocol

from quire.interfaces.server.transport.http_protocol import close_in_any_case, refused
from quire.interfaces.server.transport.slow_readers import SlowReaders, close_soon
from quire.interfaces.server.transport.unfinished import Unfinished, num_unread
from quire.interfaces.server.wire.errors import ApiError, unavailable

# Frames of one message: a bound of bytes does not count empty ones.
_MOST_FRAGMENTS = 4096


class _Handshake(ServerProtocol):
    """The library would answer one that is none with lines of text."""

    client: tuple[str, int] | None = None

    def parse(self) -> Generator[None]:
        """From the first frame on: the library would read the head a second time, with limits of its own, and end
        without a word at what it does not like."""
        yield from Protocol.parse(self)

    def accept(self, request: Request) -> Response:
        response = super().accept(request)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            return response
        kept = {name: value for name, value in response.headers.raw_items() if not name.startswith("Content-")}
        error = ApiError(response.status_code, response.body.decode().splitlines()[0], headers=kept)
        return _response_of(error, self.client)


def _response_of(error: ApiError, client: tuple[str, int] | None) -> Response:
    body = refused(error, client).body()
    ours = {"Connection": "close", "Content-Type": "application/json", "Content-Length": str(len(body))}
    return Response(error.status, HTTPStatus(error.status).phrase, Headers({**ours, **error.headers}), body)


class WebSockets(WebSocketsSansIOProtocol):
    """One connection."""

    # given by `web_sockets_of`
    head_seconds: float
    unfinished: Unfinished
    slow_readers: SlowReaders

    _has_taken = False

    conn: _Handshake

    def __init__(self, config: Config, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        # no extensions: a compressed message could be a thousand times its size
        self.conn = _Handshake(max_size=config.ws_max_size, logger=self.logger)
        # a client has as long for its answer to the end as for its part of the beginning
        self.close_timeout = self.head_seconds
        # what came before the handshake was answered
        self._early = b""

    # ------------------------------------------------------------------------------------------ beginning

    def begin(
        self, transport: asyncio.Transport, target: str, headers: Iterable[tuple[bytes, bytes]], rest: bytes
    ) -> None:
        """Takes over the connection behind the head of a handshake; `rest` came with the head."""
        self.connection_made(transport)
        transport.set_protocol(self)
        # a frame cannot be answered before the handshake is
        transport.pause_reading()
        self._early = rest
        self.unfinished.begin(self)
        self.slow_readers.arrive(self)
        self.conn.client = self.client
        texts = Headers([(name.decode("ascii"), value.decode("latin-1")) for name, value in headers])
        self.handle_connect(Request(target, texts))

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._begin_to_read()
        elif message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            # An HTTP answer ends the handshake as well: else uvicorn logs an error for each client that was refused.
            self.handshake_complete = True

    def _begin_to_read(self) -> None:
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        # for its first message it has as long as for its head
        self.unfinished.end(self)
        self.unfinished.begin(self)
        early = self._early
        self._early = b""
        if early:
            self.data_received(early)

    # ------------------------------------------------------------------------------------------ messages

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < _MOST_FRAGMENTS:
            super().handle_cont(event)
        else:
            self._break_off(CloseCode.MESSAGE_TOO_BIG, f"A message has at most {_MOST_FRAGMENTS:,} frames.")

    def handle_ping(self) -> None:
        pong = self.conn.data_to_send()
        # who does not take what is written to it gets no more of it for asking
        if self.writable.is_set():
            self.transport.write(b"".join(pong))

    def send_receive_event_to_app(self) -> None:
        self.unfinished.end(self)
        if self.curr_msg_data_type == "text" and not _is_text(self.frames):
            # uvicorn would log a traceback
            self._break_off(CloseCode.INVALID_DATA, "A text must be valid UTF-8.")
        else:
            super().send_receive_event_to_app()

    # ------------------------------------------------------------------------------------------ ending

    def connection_lost(self, exc: Exception | None) -> None:
        # it has arrived as a connection of HTTP
        self.unfinished.leave(self)
        self.slow_readers.leave(self)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._has_taken = True
        super().resume_writing()

    def has_taken(self) -> bool:
        has_taken, self._has_taken = self._has_taken, False
        return has_taken

    def give_up(self) -> bool:
        """The time for its handshake, or for its first message, is over, or others need its place."""
        if self.handshake_complete:
            text = f"No message came for {self.head_seconds:g} seconds (first_byte_seconds)."
            self._break_off(CloseCode.POLICY_VIOLATION, text)
        else:
            self._refuse(unavailable("The server had too much to do to answer this handshake in time."))
        close_soon(self.loop, self.transport)
        return True

    def has_unread(self) -> bool:
        return num_unread(self.transport) > 0

    def shutdown(self) -> None:
        close_in_any_case(self._shut_down, self.transport)

    def _shut_down(self) -> None:
        if self.transport.is_closing():
            return
        if self.handshake_complete:
            super().shutdown()
        else:
            self._refuse(unavailable("The server is shutting down."))

    def _refuse(self, error: ApiError) -> None:
        """Instead of accepting."""
        self.conn.send_response(_response_of(error, self.client))
        self.handshake_complete = self.close_sent = True
        # whoever is about to accept it need not
        self.disconnected = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def _break_off(self, code: CloseCode, reason: str) -> None:
        """After the handshake."""
        if self.conn.state is State.OPEN:
            self.conn.fail(code, reason)
            self.handle_parser_exception()
        else:
            self.transport.close()


def _is_text(frames: list[bytes]) -> bool:
    try:
        b"".join(frames).decode()
    except UnicodeDecodeError:
        return False
    return True


def web_sockets_of(head_seconds: float, unfinished: Unfinished, slow_readers: SlowReaders) -> type[WebSockets]:
    """The protocol for a server whose clients have so long for a handshake, and again for their first message."""
    members = {"head_seconds": head_seconds, "unfinished": unfinished, "slow_readers": slow_readers}
    return type("WebSockets", (WebSockets,), members)

"""uvicorn's HTTP, with errors that are OpenAI's also where no request could be read, heads that end, and upgrades that
are either a handshake of a WebSocket or none at all.

uvicorn answers what it cannot parse with a line of text, and collects headers for as long as they come. Its log says
neither whom it answered nor what. Whatever asks for a WebSocket it hands to another parser, which says nothing to what
it cannot read; and of a request that asks for any other protocol it loses the body.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.interfaces.server.access.caller import new_request_id
from quire.interfaces.server.event_stream import OUTLET, Outlet
from quire.interfaces.server.gate import MAX_HEADER_BYTES, headers_too_large
from quire.interfaces.server.wire.errors import ApiError

logger = logging.getLogger("quire.server.access")
_server_logger = logging.getLogger("quire.server")

# A client that is still sending is listened to for so long after an error.
_LISTEN_SECONDS = 1.0
# Requests of one connection that wait behind the one that is answered: while there are more, nothing is read.
_MOST_WAITING = 4


class _Head:
    """The headers of one request, while they arrive."""

    num_bytes = 0


def _outlet_of(cycle: RequestResponseCycle) -> Outlet:
    """Writes to the connection what belongs to a body in chunks, if nothing stands in its way."""
    flow = cycle.flow
    transport = cycle.transport
    # The cycle holds the scope, which holds the outlet: a ring of them would be left for the garbage collector.
    its = weakref.ref(cycle)

    def write(data: bytes) -> bool:
        cycle = its()
        if cycle is None or cycle.disconnected:
            return True
        if flow.write_paused or not cycle.response_started or cycle.response_complete or not cycle.chunked_encoding:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


def refused(error: ApiError, client: tuple[str, int] | None) -> ApiError:
    """The answer to what is no request: with an id, and a line in the log."""
    request_id = error.headers["x-request-id"] = new_request_id()
    address = "{}:{}".format(*client) if client else "somebody"
    logger.info("unreadable request from %s: %d %s %s", address, error.status, error.message, request_id)
    return error


def _not_allowed(text: str, allowed: str) -> ApiError:
    return ApiError(405, text, code="method_not_supported", headers={"allow": allowed})


def _answering(error: ApiError) -> ASGI3Application:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await error.response(scope["path"])(scope, receive, send)

    return answer


def close_in_any_case(close: Callable[[], None], transport: asyncio.Transport) -> None:
    """The end of the server does not depend on what one of its connections has come to."""
    try:
        close()
    except Exception:
        _server_logger.exception("a connection could not be closed in order; it is cut off")
        transport.abort()


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _head: _Head | None = None
    # an error was sent; what still comes is thrown away
    _is_refused = False
    # the one that is being answered; uvicorn's `cycle` is the last that came, which may wait behind it
    _answered: RequestResponseCycle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        self._head = _Head()
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        before = self.cycle
        self._unset_keepalive_if_required()
        if self.parser.should_upgrade():
            # httptools reads nothing behind such a head, and says so next
            self._check_upgrade()
            return
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope["extensions"] = {OUTLET: {"write": _outlet_of(self.cycle), "give_up": self.transport.abort}}
        if len(self.pipeline) <= _MOST_WAITING:
            # uvicorn reads nothing more while a request waits behind another one, and so not that the client has gone
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        # The clock of an idle connection is stopped by the next request and not by any byte: line ends between requests
        # may come for ever, and so may what is left of a body that was answered already.
        if self._is_refused:
            return
        before = self._head
        is_first = self.cycle is None
        self._parse(data)
        head = self._head
        if head is None or self._is_refused:
            return
        # of a packet that also holds the end of another request it is not known where this one began
        if head is before or is_first:
            head.num_bytes += len(data)
        if head.num_bytes > MAX_HEADER_BYTES:
            self._refuse(headers_too_large())

    def shutdown(self) -> None:
        close_in_any_case(super().shutdown, self.transport)

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._parse_to_upgrade(rest) :]
        except httptools.HttpParserError as failure:
            # what was raised while a part of the request was looked at
            cause = failure.__context__
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, "This is no valid HTTP/1.1 request."))

    def _parse_to_upgrade(self, data: memoryview) -> int:
        """How many bytes were read: all, or those up to the end of a head that asks for an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            num_read = int(upgrade.args[0])
        else:
            return len(data)
        if self._is_handshake:
            self._hand_over(bytes(data[num_read:]))
            return len(data)
        self._ignore_upgrade()
        return num_read

    # ------------------------------------------------------------------------------------------ upgrades

    @property
    def _is_handshake(self) -> bool:
        """Of a WebSocket. Any other upgrade is ignored, and so is one of HTTP/1.0 (RFC 9110, 7.8)."""
        return self.parser.get_http_version() == "1.1" and self._should_upgrade()

    def _check_upgrade(self) -> None:
        """Raises what a head is refused with that no WebSocket can begin with."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise _not_allowed("method=CONNECT: this server is no proxy. Use GET or POST.", "GET, HEAD, POST")
        if not self._is_handshake:
            return
        if method != b"GET":
            text = f"method={method.decode()}: a WebSocket begins with GET (RFC 6455). Leave out the header Upgrade."
            raise _not_allowed(text, "GET")
        lengths = [value for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        if lengths not in ([], [b"0"]):
            raise ApiError(400, "The handshake of a WebSocket has a body: it must have none. Send messages after it.")
        if any(name == b"sec-websocket-version" and value != b"13" for name, value in self.headers):
            text = "Sec-WebSocket-Version must be 13: that is the version of RFC 6455. Use a client that speaks it."
            raise ApiError(426, text, headers={"upgrade": "websocket", "sec-websocket-version": "13"})
        if self.cycle is not None and not self.cycle.response_complete:
            raise ApiError(400, "The handshake of a WebSocket came before the request in front of it was answered.")
        # raises for what is no address
        httptools.parse_url(self.url)

    def _hand_over(self, rest: bytes) -> None:
        """To the parser of WebSockets. `rest`: what came with the head, and stands behind it."""
        self.connections.discard(self)
        socket: Any = self.ws_protocol_class(  # type: ignore[call-arg, misc]
            config=self.config, server_state=self.server_state, app_state=self.app_state
        )
        socket.begin(self.transport, self.url.decode("ascii"), self.headers, rest)

    def _ignore_upgrade(self) -> None:
        """The same head again, as one that asks for no upgrade: only behind such a head a body is read."""
        method = self.parser.get_method()
        version = self.parser.get_http_version()
        head = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([*head, b"", b""]))

    # ------------------------------------------------------------------------------------------ refusing

    def _refuse(self, error: ApiError) -> None:
        self._is_refused = True
        refused(error, self.client)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                # what came now is another request; that one is answered, and the last
                cycle.keep_alive = False
                return
            if self.pipeline:
                # it waits behind others, and so does what it is told
                cycle.keep_alive = False
                self.pipeline[0] = cycle, _answering(error)
                return
            if cycle.response_started:
                self.transport.close()
                return
            # it is answered here, and the application says nothing more
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(self._answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # closed with something unread, the connection would be reset, and the answer lost with it
        self.loop.call_later(_LISTEN_SECONDS, self.transport.close)

    def _answer(self, error: ApiError) -> bytes:
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        first = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        return b"".join([first, *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body])


def without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The application, for one request of a client of HTTP/1.0, which knows no chunks: a body whose length is not known
    ends with its connection (RFC 9112, 6.1). uvicorn sends chunks to everybody, and closes the connection by itself."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        is_open = False

        async def send_plainly(message: Any) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open:
                    cycle.chunked_encoding = False
            elif is_open:
                # as if just this piece had been announced
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer

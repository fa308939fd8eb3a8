"""uvicorn's HTTP, with errors that are OpenAI's also where no request could be read, and heads that end.

uvicorn answers what it cannot parse with a line of text, and collects headers for as long as they come. Its log says
neither whom it answered nor what.
"""

from __future__ import annotations

import logging
import weakref
from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.interfaces.server.access.gate import MAX_HEADER_BYTES, headers_too_large
from quire.interfaces.server.access.visit import new_request_id
from quire.interfaces.server.transport.old_clients import without_chunks
from quire.interfaces.server.wire.errors import ApiError
from quire.interfaces.server.wire.event_stream import OUTLET, Outlet

logger = logging.getLogger("quire.server.access")
# uvicorn's own line for what `refused` logs with an id and an address
logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")

# A client that is still sending is listened to for so long after an error.
_LISTEN_SECONDS = 1.0
# Requests of one connection that wait behind the one that is answered: while there are more, nothing is read.
_MOST_WAITING = 4


class _Head:
    """The headers of one request, while they arrive."""

    num_bytes = 0


def _outlet_of(cycle: RequestResponseCycle) -> Outlet:
    """Writes to the connection what belongs to a body in chunks, if nothing stands in its way."""
    flow, transport = cycle.flow, cycle.transport
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


def _answering(error: ApiError) -> ASGI3Application:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await error.response(scope["path"])(scope, receive, send)

    return answer


class OpenAIProtocol(HttpToolsProtocol):
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
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head, before = None, self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope["extensions"] = {OUTLET: {"write": _outlet_of(self.cycle), "give_up": self.transport.abort}}
        if len(self.pipeline) <= _MOST_WAITING:
            # uvicorn reads nothing more while a request waits behind another one, and so not that the client has gone
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        before, is_first = self._head, self.cycle is None
        super().data_received(data)
        head = self._head
        if head is None or self._is_refused:
            return
        # of a packet that also holds the end of another request it is not known where this one began
        if head is before or is_first:
            head.num_bytes += len(data)
        if head.num_bytes > MAX_HEADER_BYTES:
            self._refuse(headers_too_large())

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls if it cannot read a request."""
        self._refuse(ApiError(400, "This is no valid HTTP/1.1 request."))

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
        self.transport.write(self._answer(error))
        self.transport.write_eof()
        # closed with something unread, the connection would be reset, and the answer lost with it
        self.loop.call_later(_LISTEN_SECONDS, self.transport.close)

    def _answer(self, error: ApiError) -> bytes:
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", error.headers["x-request-id"].encode()),
            (b"connection", b"close"),
        ]
        first = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        return b"".join([first, *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body])

"""What stands around every endpoint: the request's id and trace, limits, who it comes from, readiness, and the last
catch for exceptions.

Plain ASGI, because the first and the last event of every stream pass it, and all that go to slow clients; the others
take the outlet of event_stream.py. Decisions are taken on `scope["path"]`, the path that routing uses too; a path that
is rebuilt from the Host header can be forged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

from starlette.routing import BaseRoute, Match

from quire.interfaces.server.access.access_line import AccessLine
from quire.interfaces.server.access.caller import PUBLIC_PATHS, Caller, Door, acting_for, new_request_id
from quire.interfaces.server.access.in_flight import MOST_A_TURN, InFlight, Receive
from quire.interfaces.server.page import PATHS as PAGE_PATHS
from quire.interfaces.server.serving import Readiness, Serving
from quire.interfaces.server.wire.errors import ApiError, api_error_of, dialect_of, forbidden, unavailable
from quire.interfaces.turnstile import Turnstile
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import Tracing, current_trace

logger = logging.getLogger("quire.server.access")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# Answered without a key. The page holds no data: it asks for the key itself.
_OPEN = PUBLIC_PATHS | PAGE_PATHS
# Answered while the model loads, too.
_ALWAYS = _OPEN | {"/metrics", "/openapi.json"}
# And these, to an administrator: why an engine does not come up is to be seen while it does not.
_UNREADY = _ALWAYS | {"/v1/admin/log_level", "/sleep", "/wake_up", "/is_sleeping"}
# What monitoring asks every few seconds.
_NOT_TRACED = ("/health", "/metrics")
# The client went away before a status was sent.
_GONE = 499


class Gate:
    """Stands around the router; only headers for browsers (CORS) stand outside it."""

    def __init__(
        self,
        app: App,
        serving: Serving,
        in_flight: InFlight,
        metrics: ServerMetrics,
        tracing: Tracing | None,
        door: Door,
        allowed_origins: Sequence[str] = (),
        *,
        identifies_probes: bool = False,
    ) -> None:
        self._app = app
        self._serving = serving
        self._in_flight = in_flight
        self._metrics = metrics
        self._tracing = tracing
        self._door = door
        self._allowed_origins = frozenset(allowed_origins)
        self._identifies_probes = identifies_probes
        self._turnstile = Turnstile(MOST_A_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        own_id = _id_of_client(scope["headers"])
        request_id = own_id or new_request_id().encode()
        is_socket = scope["type"] == "websocket"
        response = _SocketResponse(send) if is_socket else _Response(send)
        is_probe = scope["path"] in PUBLIC_PATHS and scope.get("method") in ("GET", "HEAD")
        if own_id or self._identifies_probes or not is_probe:
            response.headers.append((b"x-request-id", request_id))
        dialect = dialect_of(scope["path"])
        if dialect is not None and dialect.request_id_header is not None:
            response.headers.append((dialect.request_id_header, request_id))
        began = time.monotonic()
        trace = None
        if self._tracing is not None and not scope["path"].startswith(_NOT_TRACED):
            trace = self._tracing.begin(scope.get("method", "WS"), scope["headers"])
        access_line = AccessLine(trace)
        token = current_trace.set(access_line)
        tenant = ""
        try:
            caller = self._checked(scope, request_id.decode())
            tenant = caller.name
            with acting_for(caller):
                if scope["path"] in _ALWAYS:
                    await self._app(scope, receive, response.send)
                else:
                    await self._turnstile.enter()
                    # wherever it is, it can be ended, and a server that ends waits for it
                    with nullcontext() if is_socket else self._in_flight.enter():
                        await self._app(scope, receive, response.send)
        except Exception as error:
            # nothing that an endpoint raises on purpose comes here, but a broken response or a bug does
            scope.setdefault("route", _route_of(scope))
            await response.end_with(api_error_of(error), scope, receive)
        except asyncio.CancelledError:
            # a server that ends cuts off what nothing could interrupt, such as one that had not had its turn
            if response.status or self._serving.readiness not in (Readiness.STOPPING, Readiness.DEAD):
                raise
            await response.end_with(unavailable("The server is shutting down."), scope, receive)
        finally:
            current_trace.reset(token)
            self._account(scope, response, request_id, time.monotonic() - began, tenant, access_line)

    def _checked(self, scope: Scope, request_id: str) -> Caller:
        """Raises what the request is refused with at the door."""
        headers = scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise headers_too_large()
        if scope["http_version"] != "1.0":
            _check_host(headers)
        if scope["type"] == "websocket":
            self._check_origin([value.decode("latin-1") for name, value in headers if name == b"origin"])
        elif scope["method"] == "POST":
            self._check_form(headers)
        caller = self._door.caller(headers, request_id, is_public=scope["path"] in _OPEN)
        if scope["path"] not in _UNREADY:
            self._serving.check_ready()
        return caller

    def _check_form(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Any page may send a form, or nothing at all, to any host; only before JSON a browser asks."""
        if any(name == b"content-type" and value.lower().startswith(b"application/json") for name, value in headers):
            return
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        self._check_origin([one.decode("latin-1") for one in origins if one.partition(b"://")[2] not in hosts])

    def _check_origin(self, origins: list[str]) -> None:
        """Browsers let any page open a WebSocket to any host, and ask nobody before."""
        if "*" not in self._allowed_origins and not self._allowed_origins.issuperset(origins):
            raise forbidden(f"Pages of {origins[0][:100]!r} may not use this server (option allowed_origins).")

    def _account(
        self, scope: Scope, response: _Response, request_id: bytes, seconds: float, tenant: str, access_line: AccessLine
    ) -> None:
        route = getattr(scope.get("route"), "path", "none")
        status = _GONE if scope.get("client_gone") else response.status or _GONE
        access_line.end(route, status)
        self._metrics.http_responses.add(1, route, str(status))
        level = logging.DEBUG if scope["path"] in _ALWAYS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        method = scope.get("method", "WS")
        address = scope.get("client")
        client = "{}:{}".format(*address) if address else "somebody"
        fields = {
            "client": client,
            "method": method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "request_id": request_id.decode(),
            **({"tenant": tenant} if tenant else {}),
            **access_line.fields(),
        }
        form = "%s %s %d %.3f s %s %s%s"
        words = method, route, status, seconds, fields["request_id"], client, access_line.words()
        logger.log(level, form, *words, extra={"fields": fields})


class _Response:
    """Adds headers to the head, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    async def end_with(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """If nothing was sent yet."""
        if not self.status:
            await error.response(scope["path"])(scope, receive, self.send)


class _SocketResponse(_Response):
    """The same for a WebSocket: it is accepted with 101, or refused as a request is."""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "websocket.accept":
            self.status = 101
            message["headers"] = [*message.get("headers", []), *self.headers]
        elif message["type"] == "websocket.close" and not self.status:
            # the router's word for a path that it does not know
            await self._refuse(ApiError(404, "No WebSocket is served on this path."))
            return
        await self._send(message)

    async def end_with(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        if self.status:
            await self._send({"type": "websocket.close", "code": 1011})
        else:
            await self._refuse(error)

    async def _refuse(self, error: ApiError) -> None:
        answer = error.response()
        self.status = answer.status_code
        headers = [*answer.raw_headers, *self.headers]
        await self._send({"type": "websocket.http.response.start", "status": self.status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": answer.body, "more_body": False})


def _route_of(scope: Scope) -> BaseRoute | None:
    """Where one that is refused at the door wanted to go."""
    return next((route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE), None)


def _check_host(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """RFC 9112, 3.2: who is meant must be said, once, before anybody on the way takes it for something else."""
    count = sum(name == b"host" for name, _ in headers)
    if count != 1:
        found = "The header Host is missing" if not count else f"There are {count} headers Host"
        raise ApiError(400, f"{found}: a request of HTTP/1.1 has one. Send the address of this server in it.")


def headers_too_large() -> ApiError:
    return ApiError(431, f"More than {MAX_HEADERS} headers or {MAX_HEADER_BYTES // 1024} KiB of them.")


def _id_of_client(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Its own, if it can stand in a log line, else empty; it names nothing inside the engine."""
    return next((value for name, value in headers if name == b"x-request-id" and _CLIENT_ID.fullmatch(value)), b"")

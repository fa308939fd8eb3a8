"""A request of this process to an endpoint of its own application: the same checks, the same engine, the same answer.

Owns the bytes that stand for a connection. What stands around endpoints for the sake of the network (keys, limits of
clients) is left out; the priority of everything that is asked for this way is lower than that of any client's request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.datastructures import State
from starlette.routing import BaseRoute, Route

from quire.interfaces.server.access.caller import Caller, acting_for, new_request_id
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.state import ServerState
from quire.interfaces.server.wire.errors import ENGINE_RESTARTED, api_error_of, invalid

# Greater numbers give way; a client's own is 0 unless it says otherwise.
BACKGROUND_PRIORITY = 1000
# Lines of a batch may go to these, if the application has them.
BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# not now: an overload, a server that is starting or ending, a disk without room for what is to be stored
_TEMPORARY = (429, 503, 507)
_FAILED = 500


@dataclass(frozen=True, slots=True)
class Called:
    """What an endpoint has answered."""

    status: int
    request_id: str
    # JSON
    body: bytes

    @property
    def is_temporary(self) -> bool:
        return self.status in _TEMPORARY or self.has_lost_engine

    @property
    def has_lost_engine(self) -> bool:
        """The engine died, of this request or of another one, and is started again."""
        return self.status == _FAILED and self._error_code() == ENGINE_RESTARTED

    def _error_code(self) -> str | None:
        try:
            return msgspec.json.decode(self.body, type=_ErrorAnswer).error.code
        except msgspec.MsgspecError:
            return None


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


class _Peek(msgspec.Struct):
    stream: Any = None
    background: Any = None


class _Background:
    """The engine, for requests that give way to all others."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prepare(self, prompt: Any, params: Any, *, priority: int = 0, **settings: Any) -> Any:
        return await self._engine.prepare(prompt, params, priority=max(priority, BACKGROUND_PRIORITY), **settings)

    async def embed(self, prompt: Any, params: Any, *, priority: int = 0, **settings: Any) -> Any:
        return await self._engine.embed(prompt, params, priority=max(priority, BACKGROUND_PRIORITY), **settings)


class _App:
    """All that an endpoint looks up in its application."""

    def __init__(self, server: ServerState) -> None:
        self.state = State({"server": server})


class EndpointCalls:
    """Calls endpoints of an application by their paths."""

    def __init__(
        self, routes: Iterable[BaseRoute], state: ServerState, caller_of: Callable[[str, str], Caller]
    ) -> None:
        """`caller_of`: from a tenant's name and a request's id."""
        self._state = state
        self._caller_of = caller_of
        # their functions themselves, which take a request and nothing else
        self._endpoint_by_path: dict[str, Callable[[Request], Awaitable[Response]]] = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route, Route) and route.path in BATCH_ENDPOINTS and "POST" in (route.methods or ())
        }

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._endpoint_by_path)

    async def call(self, path: str, body: bytes, tenant: str = "") -> Called:
        """Never raises for what the request or the engine did. Cancelling it aborts the request."""
        request_id = new_request_id()
        answer = _Answer()
        try:
            _check_body(body)
            scope = self._scope(path, request_id)
            receive = _Connection(body).receive
            with acting_for(self._caller_of(tenant, request_id)):
                response = await self._endpoint_by_path[path](Request(scope, receive))
                await response(scope, receive, answer.send)
        except Exception as error:
            failure = api_error_of(error)
            return Called(failure.status, request_id, failure.body())
        return Called(answer.status, request_id, b"".join(answer.chunks))

    def _scope(self, path: str, request_id: str) -> MutableMapping[str, Any]:
        # the state of this moment: an engine may have come, or another one
        server = self._state.with_engine(_Background(self._state.engine))
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            "path_params": {},
            "app": _App(server),
        }


def _check_body(body: bytes) -> None:
    try:
        peek = msgspec.json.decode(body, type=_Peek)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the endpoint says it better
    for name in ("stream", "background"):
        if getattr(peek, name):
            raise invalid(f"{name}: not in a batch, which brings whole answers. Leave it out.", name)


class _Connection:
    """Brings the body, and never leaves."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    def __init__(self) -> None:
        self.status = 0
        self.chunks: list[bytes] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.chunks.append(message.get("body", b""))

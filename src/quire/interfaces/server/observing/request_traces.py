"""A trace around every request that does some work; stands outside the gate, and only where traces are asked for."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from quire.interfaces.server.access.in_flight import Receive
from quire.interfaces.server.gate import App, Scope, Send
from quire.observability.tracing import Tracing, current_trace

# What monitoring asks every few seconds.
_NOT_TRACED = ("/health", "/metrics")
# The client went away before a status was sent; the same number as in the log.
_GONE = 499


class RequestTraces:
    """Begins a trace, lets everything inside add to it, and ends it with the status."""

    def __init__(self, app: App, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"].startswith(_NOT_TRACED):
            return await self._app(scope, receive, send)
        trace = self._tracing.begin(scope.get("method", "WS"), scope["headers"])
        status = 0

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        token = current_trace.set(trace)
        try:
            await self._app(scope, receive, watched)
        finally:
            current_trace.reset(token)
            route = getattr(scope.get("route"), "path", "none")
            trace.end(route, _GONE if scope.get("client_gone") else status or _GONE)

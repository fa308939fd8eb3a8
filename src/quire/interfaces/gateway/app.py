"""The whole application: the endpoints of the engine, and those of what stands in front of it."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from fastapi import FastAPI

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway.access import endpoints as tenants
from quire.interfaces.gateway.access.access import Callers, KeyedDoor
from quire.interfaces.gateway.access.doors import doors_of, is_loopback
from quire.interfaces.gateway.access.ledger import Ledger
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.gateway.batches import endpoints as batches
from quire.interfaces.gateway.files import endpoints as files
from quire.interfaces.gateway.responses import endpoints as responses
from quire.interfaces.gateway.services import IN_MEMORY, Services
from quire.interfaces.gateway.sessions import endpoints as sessions
from quire.interfaces.gateway.sessions import turns
from quire.interfaces.gateway.storage.data_folder import files_beside
from quire.interfaces.server.app import ADMIN_FAMILIES, ALSO_FOR_ADMINS, FAMILIES, application
from quire.interfaces.server.http_server import HttpServer
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.parts import parts_of
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.serving import Serving
from quire.interfaces.server.transport.listener import host_of
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import Tracing, make_tracing

# One file a family of endpoints: a new one is imported above and entered here.
_FAMILIES = (*FAMILIES, responses, files, batches, sessions, turns)
_ADMIN_FAMILIES = (*ADMIN_FAMILIES, tenants)


def create_app(
    engine: AsyncLLM | None = None,
    options: ServerOptions | None = None,
    *,
    is_local: bool = False,
    tracing: Tracing | None = None,
    role: ProcessRole | None = None,
    ledger: Ledger | None = None,
    **changes: Any,
) -> FastAPI:
    """`engine` is one that has started; without it every request is answered 503 until `app.state.serving.attach`.

    `changes` are options by name. `is_local`: only this machine will reach the application (doors.py). Where there is
    a port for administrators, `app.state.admin_app` is its application. `tracing`: where traces of requests
    go. Without `options` what is kept is in memory. `role`: among several processes, which keep the `ledger` together.
    """
    options = replace(options or ServerOptions(storage_url=IN_MEMORY), **changes)
    doors = doors_of(options, is_local=is_local)
    parts = parts_of(options, tracing, role)
    metrics: ServerMetrics = parts["metrics"]
    serving: Serving = parts["serving"]
    callers = Callers(
        doors.tenants,
        WaitingRoom(
            doors.tenants.by_name.values(),
            max_requests=options.max_num_queued_requests,
            max_tokens=options.max_num_queued_tokens,
            queue_seconds=options.max_queue_seconds,
            request_seconds=options.max_request_seconds,
            rejections=metrics.rejected,
            ledger=ledger,
        ),
    )
    _show(callers.room, metrics)
    families = (*_FAMILIES, *_ADMIN_FAMILIES) if doors.is_administrated_here else _FAMILIES
    beside = parts["services"] = Services(parts, callers, options)
    serving.listeners.append(beside.serve)
    app = application(
        families,
        parts,
        KeyedDoor(doors.main, callers),
        options.allowed_origins,
        options.root_path,
        identifies_probes=options.enable_request_id_headers,
    )
    app.state.admin_app = None
    if doors.admin is not None:
        admin_families = (*ALSO_FOR_ADMINS, *_ADMIN_FAMILIES)
        app.state.admin_app = application(admin_families, parts, KeyedDoor(doors.admin, callers))
    if engine is not None:
        serving.attach(engine)
    return app


def _show(room: WaitingRoom, metrics: ServerMetrics) -> None:
    metrics.queued_requests.read = lambda: room.num_requests
    metrics.queued_tokens.read = lambda: room.num_tokens
    metrics.queue_oldest_seconds.read = lambda: room.oldest_seconds


def http_server(
    options: ServerOptions,
    listener: socket.socket,
    admin_listener: socket.socket | None = None,
    *,
    role: ProcessRole | None = None,
    ledger: Ledger | None = None,
) -> HttpServer:
    """The application on its sockets; what it keeps outlives it."""
    options = replace(options, files_folder=options.files_folder or files_beside(options.storage_url))
    app = create_app(
        options=options,
        role=role,
        ledger=ledger,
        is_local=is_loopback(host_of(listener)),
        tracing=make_tracing(options.otlp_endpoint),
    )
    return HttpServer(app, options, listener, admin_listener)

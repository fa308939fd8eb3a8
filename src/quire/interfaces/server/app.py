"""The application: endpoints, error handlers and the gate around them. Holds no engine of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from quire.errors import QuireError
from quire.interfaces.server import openapi, page
from quire.interfaces.server.access.access import Access
from quire.interfaces.server.administration import adapters, admin, memory, pinned_prefixes
from quire.interfaces.server.anthropic_messages import endpoints as anthropic_messages
from quire.interfaces.server.batches import endpoints as batches
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.files import endpoints as files
from quire.interfaces.server.gate import Gate
from quire.interfaces.server.observing import health, metrics, observe
from quire.interfaces.server.observing.observed import Observed
from quire.interfaces.server.observing.request_traces import RequestTraces
from quire.interfaces.server.openai import chat, completions, embeddings, models, streamed_completion, tokenization
from quire.interfaces.server.openai_responses import endpoints as openai_responses
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.services import Services, ServiceSettings
from quire.interfaces.server.sessions import endpoints as sessions
from quire.interfaces.server.sessions import turns
from quire.interfaces.server.state import ServerState, StorageSettings
from quire.interfaces.server.transport.doors import doors_of
from quire.interfaces.server.wire.errors import INVALID, ApiError, ClientGoneError, api_error_of, invalid
from quire.observability.tracing import NoTracing, Tracing
from quire.version import __version__

# One file a family of endpoints: a new one is imported above and entered here.
_FAMILIES = (
    health,
    models,
    completions,
    streamed_completion,
    chat,
    openai_responses,
    anthropic_messages,
    embeddings,
    tokenization,
    metrics,
    openapi,
    observe,
    page,
    files,
    batches,
    sessions,
    turns,
)
# Of whoever runs the server; their routers ask `admins_only`.
_ADMIN_FAMILIES = (admin, adapters, pinned_prefixes, memory)


def create_app(
    engine: ServedEngine | None = None,
    options: ServerOptions | None = None,
    *,
    is_local: bool = False,
    tracing: Tracing | None = None,
    storage: StorageSettings | None = None,
    services: ServiceSettings | None = None,
    role: ProcessRole | None = None,
    **changes: Any,
) -> FastAPI:
    """`engine` is one that has started; without it every request is answered 503 until `app.state.server.attach`.

    `changes` are options by name. `is_local`: only this machine will reach the application (doors.py). Where there is
    a port for administrators, `app.state.admin_app` is its application. `tracing`: where traces of requests
    go. `storage`: where responses are kept; by default in memory, as long as the application lives. `services`:
    bounds of files, batches and sessions, if not those of the options. `role`: among several processes.
    """
    options = replace(options or ServerOptions(), **changes)
    doors = doors_of(options, is_local=is_local)
    state = ServerState(options, doors.tenants, tracing, storage, role)
    state.needs_key = doors.main.needs_key
    families = (*_FAMILIES, *_ADMIN_FAMILIES) if doors.is_administrated_here else _FAMILIES
    observed = Observed(state.metrics, siblings=state.role.siblings)
    app = _application(families, state, doors.main, options, observed)
    app.state.services = Services(state, app.routes, services or ServiceSettings.of(options))
    if options.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        # added last, so it stands outside the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    if not isinstance(state.tracing, NoTracing):
        app.add_middleware(RequestTraces, tracing=state.tracing)
    app.state.admin_app = None
    if doors.admin is not None:
        admin_families = (health, metrics, observe, *_ADMIN_FAMILIES)
        app.state.admin_app = _application(
            admin_families, state, doors.admin, replace(options, allowed_origins=()), observed
        )
    if engine is not None:
        state.attach(engine)
    return app


def _application(
    families: Iterable[Any], state: ServerState, access: Access, options: ServerOptions, observed: Observed
) -> FastAPI:
    """The endpoints of one port, behind a gate."""
    # its own schema would describe what FastAPI does with bodies and mistakes, and none of it happens here
    app = FastAPI(title="Quire", version=__version__, openapi_url=None, redirect_slashes=False)
    app.state.server = state
    app.state.observed = observed
    for family in families:
        # flat, so that `app.routes` is a list that a test can walk through
        app.router.routes.extend(family.router.routes)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            # whoever may read an answer may ask for its head alone
            route.methods.add("HEAD")
    for kind in (ApiError, ClientGoneError, QuireError):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(HTTPException, _handle_routing)
    app.add_exception_handler(RequestValidationError, _handle_parameters)
    app.add_middleware(Gate, state=state, access=access, allowed_origins=options.allowed_origins)
    return app


async def _handle(request: Request, error: Exception) -> Response:
    return api_error_of(error).response(request.scope["path"])


async def _handle_routing(request: Request, error: Exception) -> Response:
    """What the router itself says: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    return _routing_error(request, error, path[:200]).response(path)


def _routing_error(request: Request, error: HTTPException, path: str) -> ApiError:
    where = f"({request.method} {path})"
    if error.status_code == 405:
        text = f"Not allowed to {request.method[:20]} on {path}"
        return ApiError(405, text, code="method_not_supported", headers={"allow": _allowed(request)})
    if error.status_code == 404:
        return ApiError(404, f"Invalid URL {where}")
    return ApiError(error.status_code, str(error.detail), type=INVALID, headers=error.headers)


def _allowed(request: Request) -> str:
    """The methods of all endpoints on this path: the router itself names those of the first one only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    # /v1/responses/input_tokens is no response with this id
    exact = [route for route in routes if not route.param_convertors]
    routes = exact or routes
    return ", ".join(sorted({method for route in routes for method in route.methods}))


async def _handle_parameters(request: Request, error: Exception) -> Response:
    """A parameter of the query that is not what an endpoint declares."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])[:64]
    text = f"{name}={str(first.get('input'))[:64]!r}: {first['msg']}."
    return invalid(text, name).response(request.scope["path"])

"""The application: endpoints, error handlers and the gate around them. Holds no engine of its own."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from quire.errors import QuireError
from quire.interfaces.server import (
    admin_memory,
    admin_pinned_prefixes,
    chat,
    completions,
    embeddings,
    health,
    metrics,
    models,
    observe,
    openapi,
    page,
    streamed_completion,
    tokenization,
)
from quire.interfaces.server.anthropic_messages import endpoints as anthropic_messages
from quire.interfaces.server.batches import endpoints as batches
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.errors import INVALID, ApiError, ClientGoneError, api_error_of, invalid
from quire.interfaces.server.files import endpoints as files
from quire.interfaces.server.middleware import Gate
from quire.interfaces.server.openai_responses import endpoints as openai_responses
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.request_traces import RequestTraces
from quire.interfaces.server.services import Services, ServiceSettings
from quire.interfaces.server.sessions import endpoints as sessions
from quire.interfaces.server.sessions import turns
from quire.interfaces.server.state import ServerState, StorageSettings
from quire.observability.metric_prefixes import OWN_PREFIX
from quire.observability.metrics import ServerMetrics
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
    admin_pinned_prefixes,
    admin_memory,
    observe,
    page,
    files,
    batches,
    sessions,
    turns,
)


def create_app(
    engine: ServedEngine | None = None,
    *,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    strict: bool = False,
    metrics_prefix: str = OWN_PREFIX,
    tracing: Tracing | None = None,
    storage: StorageSettings | None = None,
    services: ServiceSettings | None = None,
) -> FastAPI:
    """`engine` is one that has started; without it every request is answered 503 until `app.state.server.attach`.

    `api_keys`: if there are any, all endpoints but /health* and /version need one of them. `allowed_origins`: for
    browsers (CORS), none by default. `strict`: any unknown request field is an error. `metrics_prefix`: of the metrics
    that vLLM has, too. `tracing`: where traces of requests go. `storage`: where responses are kept; by default in
    memory, as long as the application lives. `services`: bounds of files, batches and sessions.
    """
    # its own schema would describe what FastAPI does with bodies and mistakes, and none of it happens here
    app = FastAPI(title="Quire", version=__version__, openapi_url=None, redirect_slashes=False)
    state = ServerState(strict=strict, metrics=ServerMetrics(metrics_prefix), tracing=tracing, storage=storage)
    state.needs_key = bool(api_keys)
    app.state.server = state
    for family in _FAMILIES:
        # flat, so that `app.routes` is a list that a test can walk through
        app.router.routes.extend(family.router.routes)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            # whoever may read an answer may ask for its head alone
            route.methods.add("HEAD")
    state.services = Services(state, app.routes, services or ServiceSettings.of(ServerOptions()))
    for kind in (ApiError, ClientGoneError, QuireError):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(HTTPException, _handle_routing)
    app.add_exception_handler(RequestValidationError, _handle_parameters)
    app.add_middleware(Gate, state=state, api_keys=api_keys, allowed_origins=allowed_origins)
    if allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        # added last, so it stands outside the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    if not isinstance(state.tracing, NoTracing):
        app.add_middleware(RequestTraces, tracing=state.tracing)
    if engine is not None:
        state.attach(engine)
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

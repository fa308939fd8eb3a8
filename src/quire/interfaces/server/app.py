"""The application: endpoints, error handlers and the gate around them. Holds no engine of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from quire.errors import QuireError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server import cohere, openapi, page
from quire.interfaces.server.access.caller import Door, EverybodyMayEnter, OpenDoor
from quire.interfaces.server.administration import adapters, admin, pinned_prefixes, sleeping, weights
from quire.interfaces.server.anthropic_messages import endpoints as anthropic_messages
from quire.interfaces.server.gate import Gate
from quire.interfaces.server.llama_cpp import endpoints as llama_cpp
from quire.interfaces.server.observing import health, metrics, observe
from quire.interfaces.server.ollama import endpoints as ollama
from quire.interfaces.server.openai import (
    chat,
    classification,
    completions,
    embeddings,
    invocations,
    models,
    scoring,
    streamed_completion,
    tokenization,
    transcriptions,
)
from quire.interfaces.server.openai_responses import endpoints as openai_responses
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.parts import parts_of
from quire.interfaces.server.transport.root_path import RootPath
from quire.interfaces.server.wire.errors import INVALID, ApiError, ClientGoneError, api_error_of, invalid
from quire.observability.tracing import Tracing
from quire.version import __version__

# One file a family of endpoints: a new one is imported above and entered here.
FAMILIES = (
    health,
    models,
    completions,
    streamed_completion,
    chat,
    openai_responses,
    anthropic_messages,
    ollama,
    llama_cpp,
    embeddings,
    cohere,
    scoring,
    classification,
    transcriptions,
    tokenization,
    invocations,
    metrics,
    openapi,
    observe,
    page,
)
# Of whoever runs the server; their routers ask `admins_only`.
ADMIN_FAMILIES = (admin, adapters, pinned_prefixes, weights, sleeping)
# These stand on the port of administrators, too.
ALSO_FOR_ADMINS = (health, metrics, observe)


def create_app(
    engine: AsyncLLM | None = None, options: ServerOptions | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """One engine, for everybody who reaches it: no keys, no queue, nothing is kept (the gateway has all that)."""
    options = options or ServerOptions()
    parts = parts_of(options, tracing)
    door = OpenDoor(EverybodyMayEnter(options.max_queue_seconds, options.max_request_seconds))
    app = application(
        FAMILIES,
        parts,
        door,
        options.allowed_origins,
        options.root_path,
        identifies_probes=options.enable_request_id_headers,
    )
    if engine is not None:
        parts["serving"].attach(engine)
    return app


def application(
    families: Iterable[Any],
    parts: dict[str, Any],
    door: Door,
    allowed_origins: Sequence[str] = (),
    root_path: str | None = None,
    *,
    identifies_probes: bool = False,
) -> FastAPI:
    """The endpoints of one port, behind a gate. Without an engine all is answered 503 until `Serving.attach`."""
    # its own schema would describe what FastAPI does with bodies and mistakes, and none of it happens here
    app = FastAPI(title="Quire", version=__version__, openapi_url=None, redirect_slashes=False)
    for name, part in parts.items():
        setattr(app.state, name, part)
    app.state.needs_key = door.needs_key
    # /openapi.json, once somebody has asked for it
    app.state.openapi = None
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
    app.add_middleware(
        Gate,
        serving=parts["serving"],
        in_flight=parts["in_flight"],
        metrics=parts["metrics"],
        tracing=parts["tracing"],
        door=door,
        allowed_origins=allowed_origins,
        identifies_probes=identifies_probes,
    )
    if allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        # added last, so it stands outside the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    if root_path is not None:
        app.add_middleware(RootPath, prefix=root_path)
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

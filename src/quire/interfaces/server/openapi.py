"""GET /openapi.json: the document that is made of what the endpoints declare (api_description.py).

Made here and not by FastAPI: bodies are msgspec's, errors are OpenAI's, and nothing is described that does not happen.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import BaseRoute, WebSocketRoute

from quire.interfaces.server.access.caller import PUBLIC_PATHS
from quire.interfaces.server.openai.request_schemas import refine
from quire.interfaces.server.wire.api_description import Description, description_of
from quire.interfaces.server.wire.errors import ErrorAnswer
from quire.interfaces.server.wire.json_answer import json_answer
from quire.version import __version__

router = APIRouter()
_REF = "#/components/schemas/{name}"
_REQUEST_ID = {
    "description": "the client's own x-request-id, or a new one, which answers to probes may leave out",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
}
# Any request may meet these: headers too large, our own fault, starting or stopping.
_OF_ALL = (431, 500, 503)
# And one with a body: a mistake in it, too large, no JSON, too many requests.
_OF_BODIES = (400, 413, 415, 429)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """This server's interface."""
    app = request.app
    if app.state.openapi is None:
        app.state.openapi = msgspec.json.encode(document(app.routes, needs_key=app.state.needs_key))
    return json_answer(msgspec.Raw(app.state.openapi))


def document(routes: Sequence[BaseRoute], *, needs_key: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1."""
    shown = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    schemas = _Schemas([description_of(route) or Description() for route in shown])
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        operation = _operation(route, schemas, needs_key=needs_key)
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas.components, "headers": {"x-request-id": _REQUEST_ID}}
    info = {"title": "Quire", "version": __version__, "description": "\n\n".join(_sockets(routes))}
    whole: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return whole


def _sockets(routes: Sequence[BaseRoute]) -> Iterator[str]:
    """OpenAPI has no words for them."""
    for route in routes:
        if isinstance(route, WebSocketRoute):
            yield f"WebSocket {route.path}: {inspect.getdoc(route.endpoint)}"


class _Schemas:
    """All types of all endpoints as one set of components."""

    def __init__(self, descriptions: Sequence[Description]) -> None:
        requests = [one.request for one in descriptions if one.request is not None]
        answers = [kind for one in descriptions for kind in (one.answer, one.event, one.error) if kind is not None]
        kinds = [*requests, *answers, ErrorAnswer]
        shown, self.components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._shown = list(zip(kinds, shown, strict=True))
        of_requests = self._reached([self.of(kind) for kind in requests])
        for name in of_requests:
            refine(name, self.components[name])
        for name in self._reached([self.of(kind) for kind in [*answers, ErrorAnswer]]) - of_requests:
            _require_all(self.components[name])

    def of(self, kind: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._shown if known is kind or known == kind)

    def _reached(self, schemas: list[dict[str, Any]]) -> set[str]:
        """Names of components that these refer to, over any number of steps."""
        found: set[str] = set()
        waiting: list[Any] = list(schemas)
        while waiting:
            match waiting.pop():
                case {"$ref": str(ref)}:
                    name = ref.rpartition("/")[2]
                    if name not in found:
                        found.add(name)
                        waiting.append(self.components[name])
                case dict() as inner:
                    waiting += inner.values()
                case list() as items:
                    waiting += items
        return found


def _require_all(schema: dict[str, Any]) -> None:
    """An answer holds all its fields, also those that have a default; only UNSET ones may be missing."""
    required = set(schema.get("required", ()))
    for name, shown in schema.get("properties", {}).items():
        if "default" in shown:
            del shown["default"]
            required.add(name)
    if "properties" in schema:
        schema["required"] = [name for name in schema["properties"] if name in required]


def _operation(route: APIRoute, schemas: _Schemas, *, needs_key: bool) -> dict[str, Any]:
    description = description_of(route) or Description()
    is_public = route.path in PUBLIC_PATHS
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": (inspect.getdoc(route.endpoint) or route.name).partition("\n")[0],
    }
    if parameters := [*_path_parameters(route), *_query_parameters(route)]:
        operation["parameters"] = parameters
    if description.request is not None or description.other_bodies:
        operation["requestBody"] = {"required": not description.is_optional, "content": _bodies(description, schemas)}
    operation["responses"] = {str(description.status): _answer(description, schemas)}
    for status in _errors_of(route, description, needs_key=needs_key and not is_public):
        content = {"application/json": {"schema": schemas.of(description.error or ErrorAnswer)}}
        operation["responses"][str(status)] = _response(HTTPStatus(status).phrase, content)
    if needs_key and is_public:
        operation["security"] = []
    return operation


def _errors_of(route: APIRoute, description: Description, *, needs_key: bool) -> list[int]:
    found = {*_OF_ALL, *description.errors}
    if description.request is not None or description.other_bodies:
        found.update(_OF_BODIES)
    if route.param_convertors or (description.request and "model" in description.request.__struct_fields__):
        found.add(404)
    if route.dependant.query_params:
        found.add(400)
    if "POST" in (route.methods or ()):
        # of a page elsewhere
        found.add(403)
    if needs_key:
        found.add(401)
    return sorted(found)


def _path_parameters(route: APIRoute) -> Iterator[dict[str, Any]]:
    for name in route.param_convertors:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(route: APIRoute) -> Iterator[dict[str, Any]]:
    for parameter in route.dependant.query_params:
        info = parameter.field_info
        schema = TypeAdapter(info.rebuild_annotation()).json_schema()
        shown = {"name": parameter.alias, "in": "query", "required": info.is_required(), "schema": schema}
        yield {**shown, "description": info.description} if info.description else shown


def _bodies(description: Description, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if description.request is not None:
        content["application/json"] = {"schema": schemas.of(description.request)}
    for media_type, text in description.other_bodies.items():
        content[media_type] = {"schema": {"type": "string", "description": text}}
    return content


def _answer(description: Description, schemas: _Schemas) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if description.media_type == "application/json":
        schema = {"type": "object"} if description.answer is None else schemas.of(description.answer)
    content = {description.media_type: {"schema": schema}}
    if description.event is not None:
        content[description.event_media_type] = {"schema": _events(description, schemas)}
    return _response(HTTPStatus(description.status).phrase, content)


def _events(description: Description, schemas: _Schemas) -> dict[str, Any]:
    text = f"with stream=true: {description.event_words}"
    event = schemas.of(description.event)
    return {"type": "string", "description": text, "contentMediaType": description.event_media_type, "x-event": event}


def _response(text: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": text,
        "headers": {"x-request-id": {"$ref": "#/components/headers/x-request-id"}},
        "content": content,
    }

"""Structs as JSON answers, and as JSON schema for /openapi.json."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def json_schema_of(request_type: type[msgspec.Struct]) -> dict[str, Any]:
    """The request body of an endpoint, for FastAPI's `openapi_extra`."""
    (schema,), parts = msgspec.json.schema_components([request_type], ref_template="#/$defs/{name}")
    name = request_type.__name__
    # what the body refers to travels inside it, so that endpoints do not share a list of parts
    whole = {**parts[name], "$defs": {key: value for key, value in parts.items() if key != name}}
    assert schema == {"$ref": f"#/$defs/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}

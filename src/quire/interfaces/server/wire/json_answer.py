"""Structs as JSON answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response

from quire.interfaces.server.wire.api_description import described


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def json_schema_of(request_type: type[msgspec.Struct]) -> dict[str, Any]:
    """The request body of an endpoint whose answer is not described further."""
    return described(request=request_type)

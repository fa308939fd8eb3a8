"""Errors in Anthropic's form: {"type": "error", "error": {"type", "message"}}. The type follows from the status."""

from __future__ import annotations

import msgspec

from quire.interfaces.server.wire.dialects import DIALECTS, Dialect

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def failure_body(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


DIALECTS.append(Dialect("/v1/messages", failure_body, b"request-id"))

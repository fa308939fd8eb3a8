"""Every failure as OpenAI's error object: {"error": {"message", "type", "param", "code"}}; in other APIs as theirs.

`code` is a string or null, never a number: the official clients show a number as the code. A body never carries a
traceback, a path or an address; what went wrong inside goes to the log, under the request's id.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.errors import EngineDeadError, EngineError, RequestError, UserError

if TYPE_CHECKING:
    from fastapi import Response

logger = logging.getLogger("quire.server")

INVALID = "invalid_request_error"
# a message may quote a value; nobody wants a whole prompt back
_MAX_MESSAGE = 400
RETRY_SOON = {"retry-after": "1"}
# also on 503s while the server shuts down: whoever comes again should come to another one
CLOSE = {"connection": "close"}
ENGINE_RESTARTED = "engine_restarted"
# of what the engine keeps by name
_STATUS_BY_CODE = {"prefix_exists": 409, "prefix_not_found": 404, "adapter_not_found": 404}


@dataclass(frozen=True)
class Dialect:
    """What another API than OpenAI's expects of every answer, also of one that no endpoint has made. It enters itself
    in DIALECTS when its endpoints are imported."""

    # how its paths begin
    path: str
    # a status and a message, as its clients read them
    error_body: Callable[[int, str], bytes]
    # where its clients look for the request's id, beside the header that all get
    request_id_header: bytes | None = None
    # JSON that its clients call nothing, or a form as `curl -d` does, is taken from whoever is no browser
    takes_unnamed_json: bool = False

    def has(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


DIALECTS: list[Dialect] = []


def dialect_of(path: str) -> Dialect | None:
    """None: OpenAI's."""
    return next((dialect for dialect in DIALECTS if dialect.has(path)), None)


class ErrorObject(msgspec.Struct):
    """What went wrong, as clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of every error."""

    error: ErrorObject


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,  # noqa: A002 - the name on the wire
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 4] + " ..."
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(ErrorAnswer(ErrorObject(self.message, self.type, self.param, self.code)))

    def response(self, path: str = "") -> Response:
        """For a client of this path, in the form that it reads."""
        # Here: keys are checked with these errors before FastAPI is loaded, beside which the engine's process loads.
        from fastapi import Response

        dialect = dialect_of(path)
        body = self.body() if dialect is None else dialect.error_body(self.status, self.message)
        return Response(body, self.status, self.headers, media_type="application/json")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more. 499 in logs and metrics. `kind`: client_gone, slow_client."""

    def __init__(self, kind: str = "client_gone") -> None:
        super().__init__(kind)
        self.kind = kind


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def not_one_of(name: str, value: str, known: Collection[str]) -> ApiError:
    """The same about a word. Programs that were written for vLLM look for the last one of this sentence."""
    return invalid(f"{name}={value[:40]!r}: must be one of {', '.join(known)} (literal_error).", name, "literal_error")


def invalid_at_vllm(message: str, param: str | None = None) -> ApiError:
    """The same where only vLLM has such an address or a field, in the type that its clients know."""
    return ApiError(400, message, type="BadRequestError", param=param)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error under the name that the client used (`top_logprobs` for `logprobs`)."""
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    return RequestError(re.sub(rf"\b{error.param}\b", name, str(error)), param=name, code=error.code)


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about the fields that a request was translated into become errors about those that they were made of.

    `names`: patterns for the beginning of a field's path, and what the client calls it; the first that fits counts.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        param = error.param
        for pattern, name in names.items():
            found = re.match(rf"(?:{pattern})(?![\w])", param or "")
            if param is not None and found:
                shown = found.expand(name) + param[found.end() :]
                _rename(error, param, shown)
                break
        raise


def _rename(error: ApiError | RequestError, param: str, shown: str) -> None:
    """Wherever the sentence speaks of it."""
    error.param = shown
    text = error.message if isinstance(error, ApiError) else str(error)
    text = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", lambda _: shown, text)
    if isinstance(error, ApiError):
        error.message = text
    else:
        error.args = (text,)


def idle(message: str) -> ApiError:
    """408: the client stood still for too long in the middle of its request."""
    return ApiError(408, message, code="idle_timeout", headers=CLOSE)


def forbidden(message: str) -> ApiError:
    """403: known, and not allowed to."""
    return ApiError(403, message, type="permission_error")


def unavailable(message: str, headers: Mapping[str, str] = RETRY_SOON) -> ApiError:
    """503: not now; a client may try again."""
    return ApiError(503, message, type="server_error", code="service_unavailable", headers=headers)


def engine_lost() -> ApiError:
    """500: the engine died while it computed this request. Another one computes it if it is sent again."""
    return ApiError(
        500,
        "The engine was lost while it computed this request. Send it again: the engine is started anew.",
        type="server_error",
        code=ENGINE_RESTARTED,
        headers=RETRY_SOON,
    )


def rate_limited(message: str, seconds: int) -> ApiError:
    """429: too much at once; a client may try again after so many seconds."""
    headers = {"retry-after": str(seconds)}
    return ApiError(429, message, type="requests", code="rate_limit_exceeded", headers=headers)


def internal(message: str = "The server had an error while processing the request.") -> ApiError:
    """500: our own fault, without details."""
    return ApiError(500, message, type="server_error", code="internal_error")


def api_error_of(error: BaseException) -> ApiError:
    """The answer that an exception becomes. Logs what is not the user's mistake."""
    match error:
        case ApiError():
            return error
        case ClientGoneError():
            # nobody reads it; the status is for the log
            return ApiError(499, "The client closed the connection.")
        case RequestError():
            status = _STATUS_BY_CODE.get(error.code or "", 400)
            return ApiError(status, str(error), param=error.param, code=error.code)
        case UserError():
            return invalid(str(error))
        case EngineDeadError():
            # why it died is said once, by whoever watches over it
            return engine_lost()
        case EngineError():
            logger.error("request failed in the engine: %s", error)
            return internal("The request failed while it ran.")
        case _:
            logger.error("unexpected error", exc_info=error)
            return internal()

"""A request of this process to an endpoint of its own: the same checks, the same engine, the same answer, without HTTP.

It is done on behalf of a patient caller, who gives way to all others and has no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.datastructures import State

from quire.interfaces.server.access.caller import Caller, acting_for, new_request_id
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai import chat, classification, completions, embeddings, scoring
from quire.interfaces.server.openai_responses import endpoints as openai_responses
from quire.interfaces.server.wire.errors import ENGINE_RESTARTED, api_error_of

# Lines of a batch may go to these.
_ENDPOINTS: dict[str, Endpoint[Any]] = {
    "/v1/chat/completions": chat.ENDPOINT,
    "/v1/completions": completions.ENDPOINT,
    "/v1/embeddings": embeddings.ENDPOINT,
    "/v1/classify": classification.CLASSIFY_ENDPOINT,
    "/v1/rerank": scoring.RERANK_ENDPOINT,
    "/v1/score": scoring.SCORE_ENDPOINT,
    "/v1/responses": openai_responses.ENDPOINT,
}
# not now: an overload, a server that is starting or ending, a disk without room for what is to be stored
_TEMPORARY = (429, 503, 507)
_FAILED = 500


class Called(msgspec.Struct):
    """What an endpoint has answered, as a line of results holds it."""

    status_code: int
    request_id: str
    body: msgspec.Raw

    @property
    def is_temporary(self) -> bool:
        return self.status_code in _TEMPORARY or self.has_lost_engine

    @property
    def has_lost_engine(self) -> bool:
        """The engine died, of this request or of another one, and is started again."""
        return self.status_code == _FAILED and self._error_code() == ENGINE_RESTARTED

    def _error_code(self) -> str | None:
        try:
            return msgspec.json.decode(self.body, type=_ErrorAnswer).error.code
        except msgspec.MsgspecError:
            return None


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


class EndpointCalls:
    """Calls endpoints by their paths."""

    paths = tuple(_ENDPOINTS)

    def __init__(self, state: State, caller_of: Callable[[str, str], Caller]) -> None:
        """`caller_of`: from a tenant's name and a request's id."""
        self._state = state
        self._caller_of = caller_of

    async def call(self, path: str, body: bytes, tenant: str = "") -> Called:
        """Never raises for what the request or the engine did. Cancelling it aborts the request."""
        request_id = new_request_id()
        try:
            with acting_for(self._caller_of(tenant, request_id)):
                return Called(200, request_id, msgspec.Raw(await _ENDPOINTS[path].whole(body, self._state)))
        except Exception as error:
            failure = api_error_of(error)
            return Called(failure.status, request_id, msgspec.Raw(failure.body()))

"""The trace of a request: what the server asks of it. Without an endpoint for traces there are none.

Nothing here knows OpenTelemetry: otel.py does, and is imported when an endpoint for traces is given. No trace holds a
prompt, an answer, a key or a user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

Headers = Iterable[tuple[bytes, bytes]]
# Standard names: whoever sets one wants traces.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RequestTrace(Protocol):
    """One HTTP request. Times are of time.monotonic."""

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """What the request asks for, by the names of OpenTelemetry's conventions for generative AI."""

    def stage(self, name: str, start: float, end: float) -> None:
        """A part of the way of one prompt through the engine."""

    def count(self, num_prompt_tokens: int, num_generated_tokens: int, finish_reason: str) -> None:
        """The end of one prompt; those of a request add up."""

    def end(self, route: str, status: int) -> None: ...


class Tracing(Protocol):
    """Where traces go."""

    def begin(self, method: str, headers: Headers) -> RequestTrace:
        """A request has come; it goes on with the trace of its client, if that has sent one."""

    def statistics(self) -> Mapping[str, float]: ...

    def close(self) -> None:
        """Sends what is left, within two seconds."""


# That of the HTTP request that this task answers, and of the tasks that it starts. The server's is an AccessLine
# (access_line.py), with a trace behind it or none.
current_trace: ContextVar[RequestTrace | None] = ContextVar("quire_request_trace", default=None)


def make_tracing(endpoint: str | None) -> Tracing | None:
    """To the endpoint of the option, else of the environment, else nowhere.

    An option needs the extra `otel`; where only the environment asks, which may be that of many programs, a missing
    package is a warning.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    from quire.observability.otel import open_tracing

    return open_tracing(endpoint)

"""Traces of requests by OpenTelemetry. Imported only where somebody asks for traces; needs the extra `otel`.

A request is one span of the server, in the trace of its client if that has sent a `traceparent`, with a child for each
stage of each prompt: queue, first token, generation. Attributes follow OpenTelemetry's conventions for HTTP and for
generative AI; texts are never among them.

Spans go through a queue with an end to a thread of its own. A collector that is slow, wrong or gone costs spans, which
are counted, and never a request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.errors import OptionError
from quire.observability.tracing import Headers, RequestTrace, Tracing
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

_INSTALL = 'pip install "quire[otel]"'
_PATH = "/v1/traces"
_CLOSE_SECONDS = 2.0
# Prompts of one request whose stages become spans; a request may have hundreds.
_MOST_PROMPTS = 16
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/completions/stream": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/v1/classify": "classify",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}


def open_tracing(endpoint: str | None) -> Tracing | None:
    """To `endpoint`, or to where the environment says."""
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise OptionError(
            f"otlp_endpoint={endpoint!r}: must be a URL that begins with http:// or https://, because spans are sent "
            "over HTTP. Give the collector's, for example http://127.0.0.1:4318."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        text = f"traces need packages that are not installed ({error.name}). Install them: {_INSTALL}."
        if endpoint is not None:
            raise OptionError(f"otlp_endpoint={endpoint!r}: {text}") from None
        logger.warning("the environment asks for traces, and none are sent: %s", text)
        return None
    # what it says of every failed attempt is said here once
    logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
    return OpenTelemetryTracing(OTLPSpanExporter(endpoint=None if endpoint is None else _traces_url(endpoint)))


def _traces_url(endpoint: str) -> str:
    """A collector's base address, as OTEL_EXPORTER_OTLP_ENDPOINT has it, or the whole one."""
    return endpoint if endpoint.rstrip("/").endswith(_PATH) else endpoint.rstrip("/") + _PATH


class OpenTelemetryTracing:
    """Makes spans, and hands those that end to an exporter."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._queue = queue_ = SpanQueue(exporter)

        class Processor(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                if span.context is not None and span.context.trace_flags.sampled:
                    queue_.put(span)

        name = os.environ.get("OTEL_SERVICE_NAME") or "quire"
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Processor())
        self._tracer = provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, headers: Headers) -> RequestTrace:
        from opentelemetry.trace import SpanKind

        found = {"traceparent": [b""], "tracestate": []}
        for name, value in headers:
            if name == b"traceparent" or name == b"tracestate":
                found[name.decode()].append(value)
        # two parents are none
        parents = found["traceparent"][1:]
        carrier = {"traceparent": parents[0].decode("latin-1")} if len(parents) == 1 else {}
        if found["tracestate"]:
            carrier["tracestate"] = b",".join(found["tracestate"]).decode("latin-1")
        span = self._tracer.start_span(method, context=self._propagator.extract(carrier), kind=SpanKind.SERVER)
        return OpenTelemetryTrace(self._tracer, span, method)  # type: ignore[arg-type]

    def statistics(self) -> Mapping[str, float]:
        return {
            "trace_spans_exported_total": self._queue.num_exported,
            "trace_spans_dropped_total": self._queue.num_dropped,
        }

    def close(self) -> None:
        self._queue.close(_CLOSE_SECONDS)


class OpenTelemetryTrace:
    """The span of one HTTP request."""

    def __init__(self, tracer: Tracer, span: Span, method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method
        self._num_prompts = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._finish_reasons: list[str] = []
        # spans tell the time of day, the front end's clock only differences
        self._offset = time.time_ns() - int(time.monotonic() * 1e9)
        self._context: Context | None = None

    def describe(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def stage(self, name: str, start: float, end: float) -> None:
        from opentelemetry.trace import set_span_in_context

        if self._num_prompts >= _MOST_PROMPTS:
            return
        if self._context is None:
            self._context = set_span_in_context(self._span)
        child = self._tracer.start_span(name, context=self._context, start_time=self._time(start))
        child.end(end_time=self._time(end))

    def count(self, num_prompt_tokens: int, num_generated_tokens: int, finish_reason: str) -> None:
        self._num_prompts += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_generated_tokens += num_generated_tokens
        if self._num_prompts <= _MOST_PROMPTS:
            self._finish_reasons.append(finish_reason)

    def end(self, route: str, status: int) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.update_name(f"{self._method} {route}")
        span.set_attributes(
            {"http.request.method": self._method, "http.route": route, "http.response.status_code": status}
        )
        if route in _OPERATIONS:
            span.set_attributes({"gen_ai.operation.name": _OPERATIONS[route], "gen_ai.provider.name": "quire"})
        if self._num_prompts:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": self._num_prompt_tokens,
                    "gen_ai.usage.output_tokens": self._num_generated_tokens,
                    "gen_ai.response.finish_reasons": self._finish_reasons,
                }
            )
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _time(self, moment: float) -> int:
        return self._offset + int(moment * 1e9)


class SpanQueue:
    """Spans on their way out. Bounds are those of the environment (OTEL_BSP_...), as for any other program."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.num_exported = 0
        self.num_dropped = 0
        self._exporter = exporter
        self._spans: queue.Queue[ReadableSpan | None] = queue.Queue(_from_environment("MAX_QUEUE_SIZE", 2048))
        self._most = _from_environment("MAX_EXPORT_BATCH_SIZE", 512)
        self._pause = _from_environment("SCHEDULE_DELAY", 5000) / 1000
        self._is_closing = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="quire-traces", daemon=True)
        self._thread.start()

    def put(self, span: ReadableSpan) -> None:
        """Never waits."""
        try:
            self._spans.put_nowait(span)
        except queue.Full:
            self.num_dropped += 1

    def close(self, seconds: float) -> None:
        """Sends what is there; what is not sent by then is lost."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):
            self._spans.put_nowait(None)
        self._thread.join(seconds)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not (self._is_closing.is_set() and self._spans.empty()):
            batch = self._next_batch()
            if batch:
                self._export(batch)

    def _next_batch(self) -> list[ReadableSpan]:
        """Waits for a first one, then a while for others. None among them is the end, and wakes whoever waits."""
        batch: list[ReadableSpan] = []
        span = self._spans.get()
        deadline = time.monotonic() + self._pause
        while span is not None:
            batch.append(span)
            left = 0.0 if self._is_closing.is_set() else deadline - time.monotonic()
            if len(batch) >= self._most:
                break
            try:
                span = self._spans.get(timeout=left) if left > 0 else self._spans.get_nowait()
            except queue.Empty:
                break
        return batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever a collector does to its client, serving goes on
            logger.debug("the exporter of traces raised", exc_info=error)
            is_taken = False
        if is_taken:
            self.num_exported += len(batch)
        else:
            self.num_dropped += len(batch)
        if not is_taken and not self._has_failed:
            logger.warning("the collector of traces did not take %d spans; requests go on without", len(batch))
        self._has_failed = not is_taken


def _from_environment(name: str, default: int) -> int:
    """A count that somebody may have set; what is no count is ignored, as by other programs."""
    text = os.environ.get(f"OTEL_BSP_{name}", "")
    return int(text) if text.isdecimal() and int(text) > 0 else default

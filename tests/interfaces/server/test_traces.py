"""Traces of requests: what is in them, what is not, and that a collector cannot disturb the server."""

import asyncio
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.errors import OptionError
from quire.observability.otel import OpenTelemetryTracing, SpanQueue, open_tracing
from quire.observability.tracing import current_trace, make_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a-secret-that-no-trace-may-hold"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")


@pytest.fixture
def traced(served):
    """A server whose spans stay here: `async with traced() as (server, spans)`; `spans()` closes the tracing."""

    @contextlib.asynccontextmanager
    async def make(exporter=None, **options):
        exporter = exporter or InMemorySpanExporter()
        tracing = OpenTelemetryTracing(exporter)
        async with served(tracing=tracing, **options) as server:

            def spans():
                tracing.close()
                return {span.name: span for span in exporter.get_finished_spans()}

            yield server, spans

    return make


def test_a_request_is_a_span_with_its_stages(run, traced):
    async def main():
        async with traced() as (server, spans):
            response = await server.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "temperature": 0.5},
                traceparent=PARENT,
                tracestate="vendor=1",
            )
            assert response.status_code == 200
            await server.http.get("/health")
            await server.http.get("/metrics")
            found = spans()
        assert set(found) == {"POST /v1/chat/completions", "queue", "first token", "generation"}
        whole = found["POST /v1/chat/completions"]
        assert whole.kind is SpanKind.SERVER
        assert format(whole.context.trace_id, "032x") == PARENT.split("-")[1]
        assert format(whole.parent.span_id, "016x") == PARENT.split("-")[2]
        assert whole.context.trace_state.get("vendor") == "1"
        expected = {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "byte-model",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.finish_reasons": ("length",),
        }
        assert {name: whole.attributes[name] for name in expected} == expected
        assert whole.attributes["gen_ai.usage.input_tokens"] == response.json()["usage"]["prompt_tokens"]
        stages = [found[name] for name in ("queue", "first token", "generation")]
        assert all(stage.parent.span_id == whole.context.span_id for stage in stages)
        times = [time for stage in stages for time in (stage.start_time, stage.end_time)]
        assert times == sorted(times)
        slack = 50_000_000  # the two clocks are read one after the other
        assert whole.start_time - slack <= times[0] <= times[-1] <= whole.end_time + slack
        assert SECRET not in "".join(span.to_json() for span in found.values())

    run(main())


def test_a_stream_and_several_prompts(run, traced):
    async def main():
        async with traced() as (server, spans):
            response = await server.complete(["a", "bc"], stream=True, max_tokens=2)
            assert "[DONE]" in response.text
            whole = spans()["POST /v1/completions"]
        assert whole.attributes["gen_ai.usage.input_tokens"] == 3
        assert whole.attributes["gen_ai.usage.output_tokens"] == 4
        assert whole.attributes["gen_ai.response.finish_reasons"] == ("length", "length")

    run(main())


def test_a_prompt_that_becomes_a_vector(run, traced):
    async def main():
        async with traced() as (server, spans):
            assert (await server.post("/v1/embeddings", {"input": SECRET})).status_code == 200
            found = spans()
        assert set(found) == {"POST /v1/embeddings", "queue", "vector"}
        whole = found["POST /v1/embeddings"].attributes
        assert (whole["gen_ai.operation.name"], whole["gen_ai.request.model"]) == ("embeddings", "byte-model")
        assert (whole["gen_ai.usage.input_tokens"], whole["gen_ai.usage.output_tokens"]) == (len(SECRET), 0)
        assert SECRET not in "".join(span.to_json() for span in found.values())

    run(main())


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 99])
def test_a_bad_parent_begins_a_trace_of_its_own(run, traced, parent):
    async def main():
        async with traced() as (server, spans):
            assert (await server.http.get("/v1/models", headers={"traceparent": parent.encode()})).status_code == 200
            assert spans()["GET /v1/models"].parent is None

    run(main())


def test_an_error_and_a_client_that_leaves(run, traced):
    async def main():
        async with traced() as (server, _):
            server.fake.failures[2] = "it broke"
            assert (await server.complete()).status_code == 500
            server.fake.failures.clear()
            server.fake.hold(1)
            asking = asyncio.ensure_future(server.complete())
            while not server.fake.running:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            server.state.tracing.close()
            ends = [
                (span.attributes["http.response.status_code"], span.status.status_code)
                for span in server.state.tracing._queue._exporter.get_finished_spans()
                if span.kind is SpanKind.SERVER
            ]
        assert ends == [(500, StatusCode.ERROR), (499, StatusCode.UNSET)]

    run(main())


def test_a_client_that_does_not_want_to_be_sampled_is_not(run, traced):
    async def main():
        async with traced() as (server, spans):
            await server.post("/v1/completions", {"prompt": "a"}, traceparent=PARENT[:-2] + "00")
            assert spans() == {}
            assert server.state.tracing.statistics() == {
                "trace_spans_exported_total": 0,
                "trace_spans_dropped_total": 0,
            }

    run(main())


class Stuck(SpanExporter):
    """Takes nothing until it is let go."""

    def __init__(self):
        self.is_called, self.may_go = threading.Event(), threading.Event()

    def export(self, spans):
        self.is_called.set()
        self.may_go.wait(20)
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.may_go.set()


class Broken(SpanExporter):
    def export(self, spans):
        raise OSError("the collector is gone")

    def shutdown(self): ...


def test_a_collector_that_hangs_costs_spans_and_no_request(run, traced, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")

    async def main():
        stuck = Stuck()
        async with traced(stuck) as (server, _):
            await server.http.get("/v1/models")
            await asyncio.to_thread(stuck.is_called.wait, 20)
            for _ in range(10):
                assert (await server.http.get("/v1/models")).status_code == 200
            text = (await server.http.get("/metrics")).text
            assert 'quire:trace_spans_dropped_total{model_name="byte-model"} 7.0' in text
            stuck.may_go.set()
            server.state.tracing.close()
            assert server.state.tracing.statistics()["trace_spans_exported_total"] == 4

    run(main())


def test_a_collector_that_is_broken_is_told_of_once(run, traced, caplog):
    async def main():
        async with traced(Broken()) as (server, _):
            for _ in range(3):
                assert (await server.complete()).status_code == 200
            server.state.tracing.close()
            assert server.state.tracing.statistics()["trace_spans_dropped_total"] == 12

    run(main())
    assert caplog.text.count("did not take") == 1


def test_a_queue_that_is_closed_twice_ends(run):
    queue = SpanQueue(InMemorySpanExporter())
    queue.close(20)
    queue.close(20)
    assert not queue._thread.is_alive()


# ------------------------------------------------------------------------------------------------- over HTTP


@pytest.fixture
def collector():
    """An OTLP/HTTP collector on this machine: (url, what it got)."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, dict(self.headers), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("by_environment", [False, True])
def test_spans_reach_a_collector(run, served, collector, monkeypatch, by_environment):
    url, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-quire")
    if by_environment:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    tracing = make_tracing(None if by_environment else url)

    async def main():
        async with served(tracing=tracing) as server:
            assert (await server.complete(SECRET)).status_code == 200
        await asyncio.to_thread(tracing.close)

    run(main())
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    assert {path for path, _, _ in received} == {"/v1/traces"}
    assert received[0][1]["x-tenant"] == "blue"
    names, resources = set(), set()
    for _, headers, body in received:
        assert SECRET.encode() not in body
        if headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            resources |= {(one.key, one.value.string_value) for one in resource.resource.attributes}
            names |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"POST /v1/completions", "queue", "first token", "generation"}
    assert ("service.name", "my-quire") in resources
    assert tracing.statistics() == {"trace_spans_exported_total": 4, "trace_spans_dropped_total": 0}


# ------------------------------------------------------------------------------------------------- when there are none


def test_nobody_asks_for_traces(monkeypatch):
    assert make_tracing(None) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracing("http://127.0.0.1:1") is None


def test_an_endpoint_that_is_none():
    with pytest.raises(OptionError, match="otlp_endpoint='localhost:4317': must be a URL"):
        make_tracing("localhost:4317")


def test_a_server_that_is_told_a_wrong_endpoint_does_not_start():
    import socket

    from quire.interfaces.gateway.app import http_server
    from quire.interfaces.server.options import ServerOptions

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OptionError, match="otlp_endpoint"):
        http_server(ServerOptions(otlp_endpoint="grpc://x"), listener, None)


def test_packages_that_are_missing(monkeypatch, caplog):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OptionError, match=r'pip install "quire\[otel\]"'):
        open_tracing("http://127.0.0.1:4318")
    assert open_tracing(None) is None
    assert "none are sent" in caplog.text


def test_a_server_without_traces_follows_nobody(run, served):
    seen = []

    async def main():
        async with served() as server:
            reply_to = server.fake.reply_to
            server.fake.reply_to = lambda *args: seen.append(current_trace.get()) or reply_to(*args)
            assert (await server.complete()).status_code == 200
            assert server.state.tracing is None
            assert seen[0] is None

    run(main())

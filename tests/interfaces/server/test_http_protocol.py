"""What uvicorn would answer by itself: requests that cannot be read, heads that do not end; and methods."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from quire.interfaces.gateway import create_app


async def exchange(server_port: int, *parts: bytes) -> bytes:
    """The first answer, or all of them if it is not an error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server_port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split()[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(length)
    writer.close()
    return head + body


@pytest.fixture
def on_http(run, on_a_socket):
    """Runs `main(port)` beside a server on a socket, which has no engine."""

    def start(main):
        async def whole():
            async with on_a_socket(SimpleNamespace(app=create_app())) as url:
                await main(int(url.rpartition(":")[2]))

        run(whole())

    return start


def error_in(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    lines = head.lower().split(b"\r\n")
    assert b"content-type: application/json" in lines
    assert b"connection: close" in lines
    assert any(line.startswith(b"x-request-id: req_") for line in lines)
    assert any(line.startswith(b"date: ") for line in lines)
    return json.loads(body)["error"]


BROKEN = [
    b"\x16\x03\x01\x00\r\n\r\n",
    b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nBad Header\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /\x01 HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("data", BROKEN)
def test_what_cannot_be_read_is_an_error_object(on_http, data):
    async def main(port):
        error = error_in(await exchange(port, data), 400)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)

    on_http(main)


_HANDSHAKE = b"GET /v1/completions/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (BROKEN[0], "This is no valid HTTP/1.1 request."),
        (_HANDSHAKE + b"\r\n", "Failed to open a WebSocket connection: missing Sec-WebSocket-Key header."),
    ],
)
def test_what_cannot_be_read_is_one_line_of_the_log(on_http, caplog, data, text):
    caplog.set_level("INFO", "quire.server.access")
    answers = []

    async def main(port):
        answers.append(await exchange(port, data))
        assert error_in(answers[0], 400)["message"] == text

    on_http(main)
    [request_id] = re.findall(r"x-request-id: (req_\w+)", answers[0].decode())
    said = [one for one in caplog.records if one.levelname == "WARNING" or one.name == "quire.server.access"]
    [line] = [one.getMessage() for one in said]
    assert re.fullmatch(rf"unreadable request from 127\.0\.0\.1:\d+: 400 {re.escape(text)} {request_id}", line)


def test_headers_that_do_not_end_are_not_collected(on_http):
    async def main(port):
        error = error_in(await exchange(port, b"GET / HTTP/1.1\r\nx: ", *[b"a" * 20_000] * 8), 431)
        assert "64 KiB" in error["message"]

    on_http(main)


def test_a_long_body_is_no_head(on_http):
    async def main(port):
        head = b"POST /v1/nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"
        answer = await exchange(port, head, *[b"a" * 20_000] * 10)
        assert answer.startswith(b"HTTP/1.1 503 ")

    on_http(main)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\nhost: x", 200),
        (b"HTTP/1.0", 200),
        (b"HTTP/1.0\r\nhost: x", 200),
        (b"HTTP/1.1\r\naccept: */*", 400),
        (b"HTTP/1.1\r\nhost: x\r\nhost: x", 400),
    ],
)
def test_who_is_meant_is_said_once(on_http, head, status):
    async def main(port):
        answer = await exchange(port, b"GET /health/live " + head + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert status == 200 or b"Host" in answer

    on_http(main)


def test_garbage_behind_a_request_does_not_become_its_answer(on_http):
    async def main(port):
        answer = await exchange(port, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00\x00garbage\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 "), answer

    on_http(main)


def test_a_wrong_method_hears_of_all_that_are_allowed(run, served):
    async def main():
        async with served(is_local=True) as server:
            response = await server.http.put("/v1/admin/pinned_prefixes")
            assert response.status_code == 405
            assert response.headers["allow"] == "GET, HEAD, POST"

    run(main())


def test_whoever_may_read_may_ask_for_the_head(run, served):
    async def main():
        async with served() as server:
            for path in ("/v1/models", "/v1/models/byte-model", "/health", "/metrics", "/version", "/openapi.json"):
                assert (await server.http.head(path)).status_code == 200, path
            assert (await server.http.head("/v1/chat/completions")).status_code == 405

    run(main())


def test_parameters_of_a_query_are_errors_like_others(run):
    """Where an endpoint declares some."""
    import httpx2 as httpx

    async def main():
        app = create_app()

        @app.get("/health/live/test")
        async def endpoint(limit: int) -> int:
            return limit

        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        app.state.serving.check_ready = lambda: None
        async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
            response = await http.get("/health/live/test?limit=many")
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "limit"

    run(main())

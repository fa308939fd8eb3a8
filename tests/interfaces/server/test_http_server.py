"""What the server says of itself to requests while its engine goes and comes, and how it takes connections."""

import asyncio
import json
import socket
import threading

import httpx2 as httpx
import pytest

from quire.interfaces.gateway import create_app
from quire.interfaces.gateway.app import http_server
from quire.interfaces.server.life.process import loop_factory
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.serving import Readiness
from quire.interfaces.server.transport.listener import listen
from quire.testing.fake_engine import fake_engine


def test_one_that_is_about_to_end_takes_no_requests_again(run, tmp_path):
    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.pause()
            assert server._serving.readiness is Readiness.RESTARTING
            server.attach(engine)
            assert server._serving.readiness is Readiness.READY
            server.drain()
            # its engine dies meanwhile, and comes again
            server.pause()
            server.attach(engine)
            assert server._serving.readiness is Readiness.STOPPING
            await server.close()
        engine.shutdown()

    run(main())


def test_connections_that_come_together_are_taken_in_few_turns():
    pytest.importorskip("uvloop")
    num_connections = 64

    async def main():
        with listen("127.0.0.1", 0) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.start()
            [(_, uvicorn)] = server._ports
            while not uvicorn.started:
                await asyncio.sleep(0)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(num_connections)]
            num_turns, taken = 0, uvicorn.server_state.connections
            while len(taken) < num_connections:
                before = len(taken)
                await asyncio.sleep(0)
                num_turns += len(taken) > before
            for client in clients:
                client.close()
            await server.close()
        return num_turns

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(asyncio.wait_for(main(), 60)) <= num_connections // 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/v1/embeddings"])
def test_a_body_that_is_still_on_its_way_is_told_that_the_server_ends(run, tmp_path, caplog, path):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{{"

    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(head.encode())
            while not len(server.app.state.in_flight):
                await asyncio.sleep(0)
            server.drain()
            # nobody waits for it
            await server.app.state.in_flight.wait_empty()
            await server.close()
            answer = (await reader.read()).decode()
            writer.close()
        engine.shutdown()
        return answer

    answer = run(main())
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503")
    assert {"x-request-id", "retry-after"} <= {line.partition(":")[0] for line in head.splitlines()}
    error = json.loads(body)
    assert error["error"]["message"] == "The server is shutting down."
    assert error.get("type") == ("error" if path == "/v1/messages" else None)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


LONG = "a" * 3000
CHAT = [{"role": "user", "content": LONG}]
WITH_TEXTS = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "stream": True},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/responses": {"input": LONG},
    "/v1/responses/input_tokens": {"input": LONG},
    "/tokenize": {"prompt": LONG},
    "/v1/embeddings": {"input": ["a", LONG]},
}


@pytest.mark.parametrize("is_in_time", [True, False])
@pytest.mark.parametrize("path", WITH_TEXTS)
def test_a_server_that_ends_waits_for_what_becomes_tokens(run, tmp_path, caplog, path, is_in_time):
    body = json.dumps(WITH_TEXTS[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    has_begun, go_on = threading.Event(), threading.Event()

    async def main():
        engine = await fake_engine(tmp_path / "model", max_model_len=4096)
        render = engine.renderer.render_prompt

        def slowly(prompt, **options):
            if prompt != "a":
                has_begun.set()
                assert go_on.wait(30)
            return render(prompt, **options)

        engine.renderer.render_prompt = slowly
        with listen("127.0.0.1", 0) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(head.encode() + body)
            await asyncio.to_thread(has_begun.wait)
            server.drain()
            idle = asyncio.ensure_future(server.wait_idle(30))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not idle.done()
            if is_in_time:
                go_on.set()
                await idle
            await server.close()
            answer = await reader.read()
            go_on.set()
            writer.close()
        engine.shutdown()
        return answer

    answer = run(main())
    assert answer.startswith(b"HTTP/1.1 200" if is_in_time else b"HTTP/1.1 503")
    assert is_in_time or b"The server is shutting down." in answer
    if "stream" in WITH_TEXTS[path] and is_in_time:
        assert b"data: [DONE]" in answer
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_request_is_ended_while_it_becomes_tokens(run, tmp_path, path):
    go_on = threading.Event()

    async def main():
        engine = await fake_engine(tmp_path / "model", max_model_len=4096)
        engine.renderer.render_prompt = lambda prompt, **options: go_on.wait(30)
        app = create_app(engine, is_local=True)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            one = {"x-request-id": "one"}
            slow = asyncio.ensure_future(http.post(path, json=WITH_TEXTS[path], headers=one))
            while not app.state.in_flight._num_awaited:
                await asyncio.sleep(0)
            # the one that asks has the same name
            ended = await http.post("/v1/admin/requests/one/abort", headers=one)
            assert (ended.status_code, ended.json()["num_aborted"]) == (200, 1)
            answer = await slow
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
            assert app.state.metrics.requests_aborted.value("administrator") == 1
            assert not len(app.state.in_flight)
            await app.state.in_flight.wait_empty()
        go_on.set()
        engine.shutdown()

    run(main())

"""What the server says of itself to requests while its engine goes and comes, and how it takes connections."""

import asyncio
import json
import socket

import pytest

from quire.interfaces.server.life.event_loop import loop_factory
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.state import Readiness
from quire.interfaces.server.transport.http import HttpServer
from quire.interfaces.server.transport.listener import listen
from quire.testing.fake_engine import fake_engine


def test_one_that_is_about_to_end_takes_no_requests_again(run, tmp_path):
    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = HttpServer(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.pause()
            assert server._state.readiness is Readiness.RESTARTING
            server.attach(engine)
            assert server._state.readiness is Readiness.READY
            server.drain()
            # its engine dies meanwhile, and comes again
            server.pause()
            server.attach(engine)
            assert server._state.readiness is Readiness.STOPPING
            await server.close()
        engine.shutdown()

    run(main())


def test_connections_that_come_together_are_taken_in_few_turns():
    pytest.importorskip("uvloop")
    num_connections = 64

    async def main():
        with listen("127.0.0.1", 0) as listener:
            server = HttpServer(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
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
            server = HttpServer(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(head.encode())
            while not len(server.in_flight):
                await asyncio.sleep(0)
            server.drain()
            # nobody waits for it
            await server.in_flight.wait_empty()
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

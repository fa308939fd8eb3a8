"""One WebSocket and the clocks and bounds around it, on an application of the test."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import pytest
import uvicorn

from quire.interfaces.gateway.app import http_server
from quire.interfaces.server.life.process import end_each, loop_factory
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.connections import connections_of
from quire.interfaces.server.transport.listener import listen
from quire.interfaces.server.transport.slow_readers import SlowReaders
from quire.interfaces.server.transport.unfinished import Unfinished
from quire.interfaces.server.transport.web_sockets import WebSockets, web_sockets_of
from quire.testing.fake_engine import fake_engine

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
PING = b"\x89\xfd" + bytes(4) + b"a" * 125
MOST_SECONDS = 30


@pytest.fixture
def talk():
    """Runs `main(port, sockets)` beside a server; `sockets` are those that were begun."""

    def start(app, main, head_seconds: float = 1000.0, write_seconds: float = 1000.0, make_loop=None):
        sockets: list[WebSockets] = []

        bounds = head_seconds, Unfinished(), SlowReaders(write_seconds)

        class Watched(web_sockets_of(*bounds)):
            def begin(self, *args):
                sockets.append(self)
                super().begin(*args)

        async def whole():
            config = uvicorn.Config(
                app,
                http=connections_of(*bounds),
                ws=Watched,
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext
            with socket.create_server(("127.0.0.1", 0)) as listener:
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    return await main(listener.getsockname()[1], sockets, server)
                finally:
                    server.should_exit = True
                    await serving

        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(asyncio.wait_for(whole(), MOST_SECONDS))

    return start


async def accepting(scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def hesitating(scope, receive, send):
    await receive()
    message = await receive()
    assert message["type"] == "websocket.disconnect"
    # it comes too late, and nobody minds
    await send({"type": "websocket.accept"})


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
@pytest.mark.parametrize("how", ["in time", "shutdown"])
def test_a_handshake_that_the_server_does_not_answer_is_refused(talk, caplog, make_loop, how):
    async def main(port, sockets, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HANDSHAKE)
        if how == "shutdown":
            await until(lambda: sockets)
            server.should_exit = True
        answer = await reader.read()
        writer.close()
        return answer

    answer = talk(hesitating, main, 0.05 if how == "in time" else 1000.0, make_loop=make_loop)
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b'"code":"service_unavailable"' in answer
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
def test_who_pings_and_reads_nothing_is_not_kept_in_memory(talk, make_loop):
    num_pings = 2**17

    async def main(port, sockets, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        # as small as the system makes it
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        largest = 0
        for _ in range(num_pings // 512):
            writer.write(PING * 512)
            await writer.drain()
            largest = max(largest, sockets[0].transport.get_write_buffer_size())
        writer.transport.abort()
        return largest

    # what one read holds may be answered as a whole
    assert talk(accepting, main, make_loop=make_loop) <= 2 * 256 * 1024 < num_pings * len(PING) / 8


def test_who_takes_nothing_of_what_is_written_is_given_up(talk):
    async def app(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        with contextlib.suppress(OSError):
            while True:
                await send({"type": "websocket.send", "bytes": bytes(2**20)})

    async def main(port, sockets, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(HANDSHAKE)
        await until(lambda: sockets and sockets[0].disconnected)
        writer.transport.abort()
        return len(server.server_state.connections)

    assert talk(app, main, write_seconds=0.1) == 0


def test_who_takes_something_is_not(talk):
    async def app(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(16):
            await send({"type": "websocket.send", "bytes": bytes(2**20)})
        await send({"type": "websocket.close"})

    async def main(port, sockets, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HANDSHAKE)
        num_read = 0
        while data := await reader.read(2**20):
            num_read += len(data)
            if data.endswith(b"\x88\x02\x03\xe8"):
                break
        writer.close()
        return num_read

    assert talk(app, main) > 16 * 2**20


# ---------------------------------------------------------------------------------------------- the end of a server


@pytest.mark.parametrize("kind", ["request", "socket"])
def test_a_connection_that_cannot_be_closed_is_cut_off(run, tmp_path, monkeypatch, caplog, kind):
    def fail(self):
        raise AssertionError("a state that nobody thought of")

    handshake = HANDSHAKE.replace(b"GET /", b"GET /v1/completions/stream")

    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.start()
            clients = []
            for sent in (handshake, b"GET", handshake, b""):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(sent)
                clients.append((reader, writer))
            [(_, port)] = server._ports
            await until(lambda: len(port.server_state.connections) == len(clients))
            cut_off = WebSockets if kind == "socket" else uvicorn.protocols.http.httptools_impl.HttpToolsProtocol
            monkeypatch.setattr(cut_off, "_shut_down" if kind == "socket" else "shutdown", fail)
            await server.close()
            for reader, writer in clients:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
        engine.shutdown()
        return len(port.server_state.connections)

    assert run(main()) == 0
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert set(lines) == {"a connection could not be closed in order; it is cut off"}


def test_a_server_that_ends_does_not_wait_for_a_first_message(run, tmp_path):
    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(HANDSHAKE.replace(b"GET /", b"GET /v1/completions/stream"))
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: len(server.app.state.in_flight))
            server.drain()
            await server.app.state.in_flight.wait_empty()
            await server.close()
            rest = await reader.read()
            writer.close()
        engine.shutdown()
        return rest

    rest = run(main())
    assert b"The server is shutting down." in rest
    # 1013: try again later
    assert b"\x88\x02\x03\xf5" in rest


def test_each_step_of_an_end_is_done(run, caplog):
    done = []

    async def step(name):
        done.append(name)
        if name == "second":
            raise ValueError("it cannot")

    run(end_each(first=lambda: step("first"), second_part=lambda: step("second"), third=lambda: step("third")))
    assert done == ["first", "second", "third"]
    [record] = caplog.records
    assert record.getMessage() == "second part: its end failed; the end of the server goes on"

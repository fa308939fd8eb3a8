"""What the server says of itself to requests while its engine goes and comes, and how it takes connections."""

import asyncio
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

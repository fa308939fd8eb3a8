"""What the server says of itself to requests while its engine goes and comes."""

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

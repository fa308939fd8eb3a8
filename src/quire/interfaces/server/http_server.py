"""The application on a socket: uvicorn in this process, on the running event loop, with signals left to `run`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.life.process import end_each
from quire.interfaces.server.openai.prompt_pieces import MAX_PIECE_BYTES
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.serving import Readiness, Serving
from quire.interfaces.server.transport.connections import Connection, connections_of
from quire.interfaces.server.transport.handing_connections import handing_connections_of
from quire.interfaces.server.transport.handshakes import Handshake
from quire.interfaces.server.transport.slow_readers import SlowReaders
from quire.interfaces.server.transport.tls import Tls
from quire.interfaces.server.transport.unfinished import Descriptors, Unfinished, networks_of
from quire.interfaces.server.transport.web_sockets import web_sockets_of
from quire.interfaces.server.wire.errors import unavailable
from quire.observability.instruments import Histogram
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import Tracing

# After the last event of an interrupted stream: connections that do not close by then are dropped.
_CLOSE_SECONDS = 1
# Each costs a descriptor.
_ACCEPTED_A_TURN = 16
_LAG_PERIOD_SECONDS = 0.1


def listener_copies(listener: socket.socket) -> list[socket.socket]:
    """The same socket several times. uvloop accepts one connection of each in a turn: behind 512 that come together
    whoever asks for /health would wait for 512 turns, in which the first of them are answered already.

    Whether it waits belongs to the socket, not to the copy, and other processes may have copies as well: it must never
    wait, since who was told of a connection that another one took first would wait with its whole event loop. `dup`
    gives the copy, and so all of them, what the original believes of itself; a socket from a number believes to wait.
    """
    listener.setblocking(False)
    return [listener, *(listener.dup() for _ in range(_ACCEPTED_A_TURN - 1))]


async def _measure_loop_lag(lag: Histogram) -> None:
    """How late the event loop comes to what is due: the one number that says whether anything blocks it."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_PERIOD_SECONDS
        await asyncio.sleep(_LAG_PERIOD_SECONDS)
        lag.observe(max(0.0, loop.time() - due))


class Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's: uvicorn would raise them again at the end, and the exit status would be theirs."""
        yield


def uvicorn_of(
    app: Any, options: ServerOptions, http: type[Connection], ws: Any = "none", tls: Tls | None = None
) -> Uvicorn:
    """An application on sockets, behind this server's own protocols."""
    config = uvicorn.Config(
        app,
        http=http,
        ws=ws,
        ws_max_size=MAX_PIECE_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # a header that says who the client is can be forged, and nothing here needs it
        proxy_headers=False,
        timeout_keep_alive=options.keep_alive_seconds,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    if tls is not None:
        context = tls.context

        def handshake(**its: Any) -> Handshake:
            return Handshake(lambda: http(**its), context, http.head_seconds, http.unfinished)

        # loading sets it to what uvicorn's own options say
        config.load()
        config.http_protocol_class = handshake  # type: ignore[assignment]
    return Uvicorn(config)


class HttpServer:
    """Serves from `start` to `close`; answers requests from `attach` on."""

    def __init__(
        self,
        app: FastAPI,
        options: ServerOptions,
        listener: socket.socket,
        admin_listener: socket.socket | None = None,
    ) -> None:
        self.app = app
        self._serving: Serving = app.state.serving
        self._in_flight: InFlight = app.state.in_flight
        self.metrics: ServerMetrics = app.state.metrics
        role: ProcessRole = app.state.role
        self._is_first = role.is_first
        # of both ports: they share the descriptors of this process
        self._unfinished = Unfinished(
            options.max_unfinished_connections, networks_of(options.proxy_addresses), Descriptors()
        )
        self._slow_readers = SlowReaders()
        self._tls = None if options.ssl_certfile is None else Tls(options.ssl_certfile, options.ssl_keyfile)
        # socket and application of each port
        self._ports = [(listener, self._uvicorn_of(app, options, role))]
        if admin_listener is not None:
            self._ports.append((admin_listener, self._uvicorn_of(app.state.admin_app, options, role)))
        self._tasks: list[asyncio.Task[None]] = []
        # those that go on until the end
        self._watches: list[asyncio.Task[None]] = []

    def _uvicorn_of(self, app: FastAPI, options: ServerOptions, role: ProcessRole) -> Uvicorn:
        base = Connection if role.hand_on is None else handing_connections_of(role.hand_on, role.is_for_any)
        bounds = options.first_byte_seconds, self._unfinished, self._slow_readers
        return uvicorn_of(app, options, connections_of(*bounds, base), web_sockets_of(*bounds), self._tls)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(server.serve(sockets=listener_copies(listener))) for listener, server in self._ports
        ]
        loop = asyncio.get_running_loop()
        self.metrics.event_loop_tasks.read = lambda: len(asyncio.all_tasks(loop))
        self._watches = [asyncio.create_task(_measure_loop_lag(self.metrics.event_loop_lag))]
        if self._tls is not None:
            self._watches.append(asyncio.create_task(self._tls.watch()))

    async def adopt(self, connection: socket.socket, data: bytes) -> None:
        """A connection that another process has accepted, and read so much of. Raises OSError if it is gone."""
        _, server = self._ports[0]
        if server.should_exit:
            connection.close()
            return
        protocol: Any = server.config.http_protocol_class(  # type: ignore[call-arg]
            config=server.config, server_state=server.server_state, app_state={}
        )
        made = protocol.connection_made

        def begin(transport: asyncio.BaseTransport) -> None:
            made(transport)
            # before anything else can be read
            protocol.data_received(data)

        protocol.connection_made = begin
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)

    def attach(self, engine: AsyncLLM) -> None:
        """Requests are answered, unless the server is about to end."""
        if self._serving.readiness is not Readiness.STOPPING:
            self._serving.attach(engine)
            if self._is_first:
                self.app.state.services.resume()

    def pause(self) -> None:
        """The engine is gone, and another one is on its way."""
        if self._serving.readiness not in (Readiness.STOPPING, Readiness.ASLEEP):
            self._serving.readiness = Readiness.RESTARTING

    def stand(self, is_standing: bool) -> None:
        """The engine has work and does nothing, or it goes on."""
        self._serving.is_standing = is_standing

    def die(self) -> None:
        """The engine is gone: nothing is served any more."""
        self._serving.readiness = Readiness.DEAD

    def drain(self) -> None:
        """New requests are refused, running ones go on."""
        self._serving.readiness = Readiness.STOPPING

    def stop_listening(self) -> None:
        """New connections are for other processes of this server; those that are open stay."""
        for _, port in self._ports:
            for server in getattr(port, "servers", ()):
                server.close()

    async def wait_idle(self, seconds: float) -> None:
        """Until nothing is in flight, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._in_flight.wait_empty()

    async def close(self) -> None:
        """Ends what runs with an error event, closes connections and the socket."""
        if self._serving.readiness is not Readiness.DEAD:
            self._serving.readiness = Readiness.STOPPING
        tracing: Tracing | None = self.app.state.tracing
        await end_each(
            # before the rest, so that what is interrupted in a batch is left for the next start
            services=self.app.state.services.stop,
            connections=self._close_connections,
            **({} if tracing is None else {"tracing": lambda: asyncio.to_thread(tracing.close)}),
            storage=lambda: asyncio.to_thread(self.app.state.services.close),
        )

    async def _close_connections(self) -> None:
        self._in_flight.interrupt_all(unavailable("The server is shutting down."))
        for _, server in self._ports:
            server.should_exit = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        for watch in self._watches:
            watch.cancel()
        for task in self._tasks:
            task.result()

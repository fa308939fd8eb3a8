"""`run_server`: from options to a process that serves, and its end.

Order: the socket first (a port in use is found at once), then the configuration (a wrong option is found before
anything loads), then the engine in its own process. HTTP is served from early on: while the model loads /health and
all requests are answered 503, /health/live 200.

Ends: SIGTERM or SIGINT returns 0; the engine's death returns 70 after one line with the cause; a user's mistake
raises UserError. Every way out ends the engine's process and frees the port.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import TYPE_CHECKING, Any

from quire.config.option import checked
from quire.errors import EngineDeadError
from quire.interfaces.server.listener import listen, url_of
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.welcome import welcome
from quire.observability.logging import configure_logging
from quire.observability.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM
    from quire.interfaces.server.http import HttpServer

logger = logging.getLogger("quire.server")

EXIT_ENGINE_DIED = 70
# how often the engine's pulse is felt
_POLL_SECONDS = 0.1
# for streams that were interrupted, to send their last event
_LAST_WORDS_SECONDS = 0.5


def run_server(engine_options: dict[str, Any], host: str, port: int, **server_options: Any) -> int:
    """Serves until a signal comes. Returns the exit status; raises UserError for what can never work."""
    configure_logging()
    phases = PhaseTimer()
    options = ServerOptions(**checked(ServerOptions, server_options))
    with listen(host, port) as listener:
        with phases.measure("import"):
            from quire.interfaces.async_llm import AsyncLLM
        with phases.measure("configure"):
            engine = AsyncLLM(**engine_options)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_Server(engine, listener, options, phases).run())
        finally:
            engine.shutdown()


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # pragma: no cover - not on every platform
        return None
    return uvloop.new_event_loop


class _Server:
    """One life: starting, serving, ending."""

    def __init__(self, engine: AsyncLLM, listener: socket.socket, options: ServerOptions, phases: PhaseTimer) -> None:
        self._engine = engine
        self._listener = listener
        self._options = options
        self._phases = phases
        self._num_signals = 0
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # the engine's process loads while this one imports the HTTP server
        starting = asyncio.ensure_future(self._start_engine())
        http: HttpServer | None = None
        try:
            http = await self._open_http()
            if not await self._until_started(starting):
                return 0
            http.attach(self._engine)
            self._say_welcome()
            return await self._until_over(http)
        except EngineDeadError as error:
            return self._died(str(error))
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if http is not None:
                await http.close()
            self._engine.shutdown()

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        logger.info("%s: shutting down", signal.Signals(number).name)
        self._signalled.set()

    async def _wait_signal(self) -> None:
        await self._signalled.wait()

    # ------------------------------------------------------------------------------------------ starting

    async def _start_engine(self) -> None:
        with self._phases.measure("engine", "in its own process, of which:"):
            ready = await self._engine.start()
        self._phases.add_reported(ready.report, end=self._phases.elapsed)

    async def _open_http(self) -> HttpServer:
        with self._phases.measure("HTTP server", "while the engine loads"):
            http = await asyncio.to_thread(_make_http, self._options)
            http.start(self._listener)
        return http

    async def _until_started(self, starting: asyncio.Future[None]) -> bool:
        """False if a signal came first. Raises what the start raised."""
        signalled = asyncio.ensure_future(self._wait_signal())
        await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if starting.done():
            starting.result()
        return starting.done()

    def _say_welcome(self) -> None:
        logger.info("where the start-up time went:\n%s", self._phases.table())
        name, renderer = self._engine.config.served_model_name, self._engine.renderer
        is_chat, has_key = renderer.has_chat_template, bool(self._options.api_keys)
        print(welcome(url_of(self._listener), name, is_chat=is_chat, has_key=has_key), flush=True)

    # ------------------------------------------------------------------------------------------ serving, ending

    async def _until_over(self, http: HttpServer) -> int:
        while not self._signalled.is_set():
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._signalled.wait()
            except TimeoutError:
                pass
            if self._engine.dead_reason is not None:
                # its client has told every request in flight; they say so to their clients now
                http.die()
                await http.wait_idle(_LAST_WORDS_SECONDS)
                return self._died(self._engine.dead_reason)
        http.drain()
        await self._wait_drained(http)
        return 0

    async def _wait_drained(self, http: HttpServer) -> None:
        """Until nothing runs, the time is over, or a second signal comes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.shutdown_timeout
        while len(http.in_flight) and loop.time() < deadline and self._num_signals < 2:
            await http.wait_idle(min(_POLL_SECONDS, max(0.0, deadline - loop.time())))

    def _died(self, reason: str) -> int:
        logger.critical("the engine died: %s", reason.strip().splitlines()[-1] if reason.strip() else "no reason given")
        return EXIT_ENGINE_DIED


def _make_http(options: ServerOptions) -> HttpServer:
    from quire.interfaces.server.http import HttpServer

    return HttpServer(
        api_keys=options.api_keys,
        allowed_origins=options.allowed_origins,
        strict=options.strict,
        metrics_prefix=options.metrics_prefix,
        otlp_endpoint=options.otlp_endpoint,
    )

"""`run_server`: from options to a process that serves, and its end.

Order: the socket first (a port in use is found at once), then the configuration (a wrong option is found before
anything loads), then the engine in its own process. HTTP is served from early on: while the model loads /health and
all requests are answered 503, /health/live 200.

Ends: SIGTERM or SIGINT returns 0; an engine that died too often returns 70 after one line with the cause; a user's
mistake raises UserError. Every way out ends the engine's process and frees the port.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.config.kv_store import BOTH
from quire.config.option import checked
from quire.errors import EngineDeadError, OptionError
from quire.interfaces.gateway.access.doors import doors_of, is_loopback
from quire.interfaces.gateway.files.disk import check_folder
from quire.interfaces.gateway.welcome import example_for, welcome
from quire.interfaces.server.life.process import end_each, loop_factory, set_aside
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.process_role import Alone, ProcessRole
from quire.interfaces.server.transport.listener import host_of, listen, listen_at, url_of
from quire.interfaces.server.transport.tls import Tls
from quire.interfaces.server.transport.unfinished import networks_of
from quire.observability.logging import configure_logging, flush_log
from quire.observability.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.interfaces.async_llm import AsyncLLM
    from quire.interfaces.gateway.access.ledger import Ledger
    from quire.interfaces.gateway.processes.fleet import Fleet
    from quire.interfaces.gateway.processes.shared_ledger import SharedLedger
    from quire.interfaces.server.http_server import HttpServer
    from quire.interfaces.server.life.supervisor import Supervisor
    from quire.interfaces.server.process_role import Siblings

logger = logging.getLogger("quire.server")

EXIT_ENGINE_DIED = 70
# for streams that were interrupted, to send their last event
_LAST_WORDS_SECONDS = 0.5
# for further processes, to end when they have nothing to do any more
_END_SECONDS = 3.0
# no progress for so long means that the engine is stalled, if nobody says otherwise
_STALL_SECONDS_ON_CPU = 30.0
_STALL_SECONDS = 120.0


def run_server(engine_options: dict[str, Any], host: str, port: int, **server_options: Any) -> int:
    """Serves until a signal comes. Returns the exit status; raises UserError for what can never work."""
    configure_logging(in_background=True)
    phases = PhaseTimer()
    options = ServerOptions(**checked(ServerOptions, server_options))
    try:
        # a key file that cannot be read is found before anything loads
        doors_of(options)
        # so is a proxy that has no address
        networks_of(options.proxy_addresses)
        if options.files_folder:
            check_folder(options.files_folder)
        check_tls(options)
        main_listener = listen(host, port) if options.uds is None else listen_at(options.uds)
        with main_listener as listener, _admin_listener(options) as admin_listener:
            with phases.measure("import"):
                from quire.interfaces.async_llm import AsyncLLM
            with phases.measure("configure"):
                engine = AsyncLLM(**engine_options)
                check_possible(options, engine.config)
                options = with_shared_secret(options)
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    return runner.run(_Server(engine, listener, admin_listener, options, phases).run())
            finally:
                engine.shutdown()
    finally:
        flush_log()


def with_shared_secret(options: ServerOptions) -> ServerOptions:
    """A tenant's part of the prefix cache has one name in all processes."""
    if options.api_server_count == 1 or options.tenant_secret is not None:
        return options
    return replace(options, tenant_secret=secrets.token_hex(32))


def check_tls(options: ServerOptions) -> None:
    """Before anything loads."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise OptionError(
                f"ssl_keyfile={options.ssl_keyfile}: a key alone is no use. Give its ssl_certfile as well."
            )
        return
    if options.api_server_count > 1:
        raise OptionError(
            f"api_server_count={options.api_server_count}: an encrypted connection cannot go from one process to "
            "another. Leave out ssl_certfile and put a proxy with TLS in front, or serve with one process."
        )
    Tls(options.ssl_certfile, options.ssl_keyfile)


def check_possible(options: ServerOptions, config: EngineConfig) -> None:
    shares_names = options.tenant_secret is not None or options.share_prefix_cache
    if config.role != BOTH and not shares_names and doors_of(options).tenants.are_several:
        raise OptionError(
            f"role={config.role}: each tenant's blocks have names of their own, and servers with the other half find "
            "them only with the same tenant_secret (QUIRE_TENANT_SECRET). Give all of them one."
        )
    if options.api_server_count > 1 and options.further_models:
        raise OptionError(
            f"api_server_count={options.api_server_count}: models that are loaded on demand belong to one process. "
            "Leave out further_models or api_server_count."
        )
    if options.api_server_count > 1 and config.engine_process is False:
        raise OptionError(
            f"api_server_count={options.api_server_count}: several processes need an engine in a process of its own, "
            "and engine_process=False keeps it in the server's. Leave one of them out."
        )


def _admin_listener(options: ServerOptions) -> AbstractContextManager[socket.socket | None]:
    return nullcontext() if options.admin_port is None else listen(options.admin_host, options.admin_port, "admin_")


class NoFleet(Alone):
    """The fleet of a server that is one process: there is nobody to tell anything."""

    def start(self, http: Any) -> None: ...

    async def engine_is_ready(self) -> None: ...

    def engine_is_back(self) -> None: ...

    def engine_is_lost(self, cause: str) -> None: ...

    def replica_is_back(self, number: int) -> None: ...

    def engine_stands(self, is_standing: bool) -> None: ...

    def drain(self) -> None: ...

    def hurry(self) -> None: ...

    def die(self, cause: str) -> None: ...

    async def wait_gone(self) -> None: ...

    async def close(self) -> None: ...


class _Server:
    """One life: starting, serving, ending."""

    def __init__(
        self,
        engine: AsyncLLM,
        listener: socket.socket,
        admin_listener: socket.socket | None,
        options: ServerOptions,
        phases: PhaseTimer,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._admin_listener = admin_listener
        self._options = options
        self._phases = phases
        self._num_signals = 0
        self._signalled = asyncio.Event()
        self._signalled_twice = asyncio.Event()
        self._tasks: list[asyncio.Future[Any]] = []

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # the engine's process loads while this one imports the HTTP server
        starting = self._begin(self._start_engine())
        # it begins here, and not in turns with these imports
        await asyncio.sleep(0)
        http: HttpServer | None = None
        fleet: Fleet | NoFleet = NoFleet()
        ledger: Ledger | None = None
        try:
            if self._options.api_server_count > 1:
                fleet, ledger = await asyncio.to_thread(_make_fleet, self._options, self._engine, self._listener)
            http = await self._open_http(fleet, ledger)
            if self._options.storage_url is not None:
                # a mistake in it ends the start; the default is opened when something is stored
                await http.app.state.services.storage.open()
            fleet.start(http)
            supervisor = _make_supervisor(self._engine, http, fleet, self._options)
            self._begin(supervisor.watch())
            self._begin(supervisor.tend_replicas())
            if not await self._is_done_before_a_signal(starting):
                return 0
            if not await self._is_done_before_a_signal(self._begin(fleet.engine_is_ready())):
                return 0
            with set_aside():
                http.attach(self._engine)
                self._say_welcome()
                return await self._until_over(http, supervisor, fleet)
        except EngineDeadError as error:
            return self._died(str(error))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if http is not None:
                await end_each(HTTP_server=http.close, further_models=http.app.state.models.further.close)
            await end_each(fleet=fleet.close)
            self._engine.shutdown()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        logger.info("%s: shutting down", signal.Signals(number).name)
        self._signalled.set()
        if self._num_signals > 1:
            self._signalled_twice.set()

    async def _is_done_before_a_signal(self, task: asyncio.Future[Any]) -> bool:
        """False if a signal came first. Raises what the task raised."""
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if task.done():
            task.result()
        return task.done()

    # ------------------------------------------------------------------------------------------ starting

    async def _start_engine(self) -> None:
        with self._phases.measure("engine", "in its own process, of which:"):
            ready = await self._engine.start()
        self._phases.add_reported(ready.report, end=self._phases.elapsed)

    async def _open_http(self, siblings: Siblings, ledger: Ledger | None) -> HttpServer:
        with self._phases.measure("HTTP server", "while the engine loads"):
            http = await asyncio.to_thread(self._make_http, siblings, ledger)
            http.start()
        return http

    def _make_http(self, siblings: Siblings, ledger: Ledger | None) -> HttpServer:
        from quire.interfaces.gateway.app import http_server

        role = ProcessRole(siblings=siblings)
        return http_server(self._options, self._listener, self._admin_listener, role=role, ledger=ledger)

    def _say_welcome(self) -> None:
        logger.info("where the start-up time went:\n%s", self._phases.table())
        name = self._engine.config.served_model_name
        has_template = self._engine.renderer.has_chat_template
        example = example_for(self._engine.config.facts, has_chat_template=has_template)
        has_key = bool(self._options.api_keys or self._options.api_key_file)
        scheme = "http" if self._options.ssl_certfile is None else "https"
        if self._admin_listener is not None:
            logger.info("administration: %s/v1/admin", url_of(self._admin_listener, scheme))
        host = host_of(self._listener)
        if host and not has_key and not is_loopback(host):
            logger.warning("host=%s: whoever reaches this machine may use the model. Keys: --api-key.", host)
        url = url_of(self._listener, scheme)
        print(welcome(url, name, example, has_key=has_key, uds=self._options.uds), flush=True)

    # ------------------------------------------------------------------------------------------ serving, ending

    async def _until_over(self, http: HttpServer, supervisor: Supervisor, fleet: Fleet | NoFleet) -> int:
        def lost() -> None:
            http.pause()
            fleet.engine_is_lost(self._engine.dead_reason or "")

        def ready() -> None:
            http.attach(self._engine)
            fleet.engine_is_back()

        supervising = self._begin(supervisor.run(lost, ready))
        if await self._is_done_before_a_signal(supervising):
            http.die()
            fleet.die(supervising.result())
            # those that were in flight have heard of it, and say so to their clients now
            await http.wait_idle(_LAST_WORDS_SECONDS)
            await asyncio.wait({self._begin(fleet.wait_gone())}, timeout=_END_SECONDS)
            return self._died(supervising.result())
        http.drain()
        fleet.drain()
        await self._wait_drained(http, fleet)
        return 0

    async def _wait_drained(self, http: HttpServer, fleet: Fleet | NoFleet) -> None:
        """Until nothing runs, the time is over, or a second signal comes."""
        idle = self._begin(http.wait_idle(self._options.shutdown_timeout))
        gone = self._begin(fleet.wait_gone())
        hurried = self._begin(self._signalled_twice.wait())
        both = self._begin(asyncio.wait({idle, gone}))
        longest = self._options.shutdown_timeout + _END_SECONDS
        await asyncio.wait({both, hurried}, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            fleet.hurry()
            await asyncio.wait({gone}, timeout=_END_SECONDS)

    def _died(self, reason: str) -> int:
        logger.critical("the engine died: %s", reason.strip().splitlines()[-1] if reason.strip() else "no reason given")
        return EXIT_ENGINE_DIED


def _make_fleet(options: ServerOptions, engine: AsyncLLM, listener: socket.socket) -> tuple[Fleet, SharedLedger]:
    from quire.interfaces.gateway.processes.fleet import open_fleet

    return open_fleet(options, engine.config, listener, engine)


def _make_supervisor(engine: AsyncLLM, http: HttpServer, fleet: Fleet | NoFleet, options: ServerOptions) -> Supervisor:
    from quire.interfaces.server.life.crash_reports import CrashReports, folder_of
    from quire.interfaces.server.life.supervisor import Supervisor
    from quire.interfaces.server.restart_policy import RestartPolicy

    timeout = options.stall_timeout
    if timeout is None:
        timeout = _STALL_SECONDS_ON_CPU if engine.config.worker.device == "cpu" else _STALL_SECONDS

    def stands(is_standing: bool) -> None:
        http.stand(is_standing)
        fleet.engine_stands(is_standing)

    return Supervisor(
        engine,
        RestartPolicy(options.max_engine_restarts, options.engine_restart_window),
        CrashReports(folder_of(options.crash_reports)),
        http.metrics,
        stall_timeout=timeout,
        on_standing=stands,
        on_replica=fleet.replica_is_back,
    )

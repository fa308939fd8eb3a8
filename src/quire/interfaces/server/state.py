"""What all endpoints of one server share. Owned by the application; there is nothing global."""

from __future__ import annotations

import enum
import time
from dataclasses import replace
from typing import Any

from starlette.requests import HTTPConnection

from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.access.turnstile import Turnstile
from quire.interfaces.server.engine import ServedEngine, generation_defaults
from quire.interfaces.server.life.log_level import LogLevelOfEngine
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.services import NoServices, Services
from quire.interfaces.server.wire.errors import CLOSE, RETRY_SOON, ApiError, unavailable
from quire.interfaces.text_threads import TextThreads
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import NoTracing, Tracing


class Readiness(enum.Enum):
    """Only a READY server takes requests."""

    STARTING = "the model is still loading"
    READY = "ready"
    RESTARTING = "the engine died and is being started again"
    STOPPING = "the server is shutting down"
    DEAD = "the engine has died"


class ServerState:
    """The engine, whether it serves, and what is under way."""

    def __init__(
        self,
        options: ServerOptions | None = None,
        tracing: Tracing | None = None,
        role: ProcessRole | None = None,
    ) -> None:
        self.options = options = options or ServerOptions()
        self.role = role or ProcessRole()
        # given by whoever makes the application
        self.services: Services = NoServices()
        self.readiness = Readiness.STARTING
        self.metrics = ServerMetrics(options.metrics_prefix)
        self.in_flight = InFlight(lambda kind: self.metrics.requests_aborted.add(1, kind))
        self.log_level = LogLevelOfEngine()
        # it was ready once
        self.has_started = False
        self.tracing = tracing or NoTracing()
        # one of them is put together or parsed in a turn of the event loop
        self.long_bodies = Turnstile(1)
        self.text_threads = TextThreads()
        # the end of an answer must not wait for the long texts of others
        self.count_threads = TextThreads(1)
        self.strict = options.strict
        self.created = int(time.time())
        self.model_name = ""
        self.defaults: dict[str, Any] = {}
        self._engine: ServedEngine | None = None

    @property
    def engine(self) -> ServedEngine:
        if self._engine is None:
            raise unavailable(f"Not ready: {Readiness.STARTING.value}.")
        return self._engine

    def attach(self, engine: ServedEngine) -> None:
        """From here on requests are answered."""
        self._engine = engine
        self.model_name = engine.config.served_model_name
        self.defaults = generation_defaults(engine.config)
        self.metrics.set_model_name(self.model_name)
        self.services.serve(engine)
        self.readiness = Readiness.READY
        self.has_started = True
        self.log_level.engine_serves(engine)

    @property
    def max_model_len(self) -> int:
        """What the engine found room for, which may be less than what was asked."""
        return self.engine.ready.max_model_len

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def check_ready(self) -> None:
        """Raises 503 unless requests are answered. A dead engine is noticed here, before anything polls it."""
        if self.readiness is Readiness.READY and self.engine.dead_reason is not None:
            self.readiness = Readiness.DEAD
        if self.readiness is not Readiness.READY:
            is_ending = self.readiness is Readiness.STOPPING
            raise unavailable(f"Not ready: {self.readiness.value}.", {**RETRY_SOON, **(CLOSE if is_ending else {})})

    def own_model(self, name: str | None) -> ServedModel:
        """For what is of the model alone."""
        if name is not None and name != self.model_name:
            raise self._unknown(name)
        return ServedModel(
            self.model_name, self.engine, self.defaults, self.metrics, self.text_threads, self.count_threads
        )

    async def model_of(self, name: str | None) -> ServedModel:
        """The one that a request names, which may be an adapter."""
        if name is None or name == self.model_name or not self.engine.config.worker.max_loras:
            return self.own_model(name)
        adapter = await self.engine.find_adapter(name)
        if adapter is None:
            raise self._unknown(name)
        return replace(self.own_model(None), name=name, adapter=adapter)

    def _unknown(self, name: str) -> ApiError:
        text = f"The model `{name[:200]}` does not exist. This server has `{self.model_name}`."
        return ApiError(404, text, param="model", code="model_not_found")


def tenant_of(connection: HTTPConnection) -> str:
    """Who asks, as the door said. What one tenant stores is not there for another."""
    return current_caller().name


def state_of(connection: HTTPConnection) -> ServerState:
    """Of a request, or of a WebSocket."""
    state: ServerState = connection.app.state.server
    return state

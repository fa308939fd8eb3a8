"""What all endpoints of one server share. Owned by the application; there is nothing global."""

from __future__ import annotations

import copy
import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from quire.interfaces.server.access.caller import Caller, current_caller
from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.access.tenants import Tenants
from quire.interfaces.server.access.turnstile import Turnstile
from quire.interfaces.server.access.waiting_room import WaitingRoom
from quire.interfaces.server.adapter_engine import AdapterEngine
from quire.interfaces.server.engine import ServedEngine, generation_defaults
from quire.interfaces.server.life.log_level import LogLevelOfEngine
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.wire.errors import CLOSE, RETRY_SOON, ApiError, unavailable
from quire.interfaces.text_threads import TextThreads
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import NoTracing, Tracing

if TYPE_CHECKING:
    from quire.interfaces.server.storage.storage import Storage


class Readiness(enum.Enum):
    """Only a READY server takes requests."""

    STARTING = "the model is still loading"
    READY = "ready"
    RESTARTING = "the engine died and is being started again"
    STOPPING = "the server is shutting down"
    DEAD = "the engine has died"


IN_MEMORY = "sqlite:///:memory:"


@dataclass(frozen=True)
class StorageSettings:
    """Where things are kept, how much and how long. url None: in a file in the user's data folder."""

    url: str | None = None
    max_bytes: int = 2**30
    max_age_days: float = 30.0


class _LazyStorage:
    """One for all views of a server's state."""

    def __init__(self, settings: StorageSettings) -> None:
        self._settings = settings
        self._storage: Storage | None = None

    def opened(self) -> Storage:
        if self._storage is None:
            from quire.interfaces.server.storage.storage import Storage

            url = self._settings.url
            max_bytes = self._settings.max_bytes
            max_age = self._settings.max_age_days * 86_400
            self._storage = Storage(url, max_bytes=max_bytes, max_age_seconds=max_age)
        return self._storage

    def statistics(self) -> dict[str, float]:
        return {} if self._storage is None else self._storage.statistics()

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()


class ServerState:
    """The engine, whether it serves, and what is under way."""

    def __init__(
        self,
        options: ServerOptions | None = None,
        tenants: Tenants | None = None,
        tracing: Tracing | None = None,
        storage: StorageSettings | None = None,
        role: ProcessRole | None = None,
    ) -> None:
        options = options or ServerOptions()
        self.role = role or ProcessRole()
        self.readiness = Readiness.STARTING
        self.metrics = ServerMetrics(options.metrics_prefix)
        self.in_flight = InFlight(lambda kind: self.metrics.requests_aborted.add(1, kind))
        self.log_level = LogLevelOfEngine()
        # it was ready once
        self.has_started = False
        self.tracing = tracing or NoTracing()
        self.tenants = tenants or Tenants()
        self.room = WaitingRoom(
            self.tenants.by_name.values(),
            max_requests=options.max_num_queued_requests,
            max_tokens=options.max_num_queued_tokens,
            queue_seconds=options.max_queue_seconds,
            request_seconds=options.max_request_seconds,
            rejections=self.metrics.rejected,
            ledger=self.role.ledger,
        )
        self.metrics.queued_requests.read = lambda: self.room.num_requests
        self.metrics.queued_tokens.read = lambda: self.room.num_tokens
        self.metrics.queue_oldest_seconds.read = lambda: self.room.oldest_seconds
        self.max_body_bytes = options.max_body_bytes
        self.max_text_body_bytes = options.max_text_body_bytes
        self.body_seconds = options.first_byte_seconds
        # one of them is put together or parsed in a turn of the event loop
        self.long_bodies = Turnstile(1)
        self.text_threads = TextThreads()
        # the end of an answer must not wait for the long texts of others
        self.count_threads = TextThreads(1)
        self.strict = options.strict
        self.needs_key = False
        # /openapi.json, once somebody has asked for it
        self.openapi: bytes | None = None
        self.created = int(time.time())
        self.model_name = ""
        # below it lie the adapters that may be loaded over HTTP; None: none may
        self.adapter_root = options.adapter_root
        self.defaults: dict[str, Any] = {}
        self._engine: ServedEngine | None = None
        self._storage = _LazyStorage(storage or StorageSettings(IN_MEMORY))

    @property
    def storage(self) -> Storage:
        """Where things are kept beyond a request; imported by its first use."""
        return self._storage.opened()

    def storage_statistics(self) -> dict[str, float]:
        """Empty as long as nothing was stored."""
        return self._storage.statistics()

    def close_storage(self) -> None:
        """At the end: what was handed in is written first."""
        self._storage.close()

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
        self.room.set_capacity(engine.ready.num_blocks * engine.ready.block_size)
        self.readiness = Readiness.READY
        self.has_started = True
        self.log_level.engine_serves(engine)

    def with_engine(self, engine: Any) -> ServerState:
        """The same server for one request, which sees the engine through something."""
        view = copy.copy(self)
        view._engine = engine
        return view

    @property
    def max_model_len(self) -> int:
        """What the engine found room for, which may be less than what was asked."""
        return self.engine.ready.max_model_len

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def caller_of(self, tenant: str, request_id: str = "") -> Caller:
        """For work on behalf of a tenant that no request stands behind any more."""
        return Caller(self.tenants.named(tenant), self.tenants, self.room, request_id=request_id, is_patient=True)

    def check_ready(self) -> None:
        """Raises 503 unless requests are answered. A dead engine is noticed here, before anything polls it."""
        if self.readiness is Readiness.READY and self.engine.dead_reason is not None:
            self.readiness = Readiness.DEAD
        if self.readiness is not Readiness.READY:
            is_ending = self.readiness is Readiness.STOPPING
            raise unavailable(f"Not ready: {self.readiness.value}.", {**RETRY_SOON, **(CLOSE if is_ending else {})})

    def check_model(self, name: str | None) -> None:
        """For what is of the model alone."""
        if name is not None and name != self.model_name:
            raise self._unknown(name)

    async def of_model(self, name: str | None) -> ServerState:
        """The server as a request sees it that names this model, which may be an adapter."""
        if name is None or name == self.model_name:
            return self
        if not self.engine.config.worker.max_loras:
            raise self._unknown(name)
        adapter = await self.engine.find_adapter(name)
        if adapter is None:
            raise self._unknown(name)
        view = self.with_engine(AdapterEngine(self.engine, adapter))
        view.model_name = name
        return view

    def _unknown(self, name: str) -> ApiError:
        text = f"The model `{name[:200]}` does not exist. This server has `{self.model_name}`."
        return ApiError(404, text, param="model", code="model_not_found")


def tenant_of(connection: HTTPConnection) -> str:
    """Who asks, as the gate found by the key. What one tenant stores is not there for another."""
    return current_caller().tenant.name


def state_of(connection: HTTPConnection) -> ServerState:
    """Of a request, or of a WebSocket."""
    state: ServerState = connection.app.state.server
    return state

"""Whether a server answers requests, and with which engine."""

from __future__ import annotations

import enum
from collections.abc import Callable

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.wire.errors import CLOSE, RETRY_SOON, unavailable


class Readiness(enum.Enum):
    """Only a READY server takes requests."""

    STARTING = "the model is still loading"
    READY = "ready"
    RESTARTING = "the engine died and is being started again"
    ASLEEP = "the engine sleeps until somebody wakes it up (POST /wake_up)"
    STOPPING = "the server is shutting down"
    DEAD = "the engine has died"


class Serving:
    """The engine, once there is one. Whoever needs to hear of each new one is in `listeners`."""

    def __init__(self) -> None:
        self.readiness = Readiness.STARTING
        # it was ready once
        self.has_started = False
        # The engine has work and does nothing. Requests are taken: it may go on, and is ended if it does not.
        self.is_standing = False
        self.listeners: list[Callable[[AsyncLLM], None]] = []
        self._engine: AsyncLLM | None = None

    @property
    def engine(self) -> AsyncLLM:
        if self._engine is None:
            raise unavailable(f"Not ready: {Readiness.STARTING.value}.")
        return self._engine

    def attach(self, engine: AsyncLLM) -> None:
        """From here on requests are answered."""
        self._engine = engine
        for hear in self.listeners:
            hear(engine)
        self.readiness = Readiness.READY
        self.has_started = True
        self.is_standing = False

    def fall_asleep(self) -> None:
        """No request is answered until another `attach`."""
        self.readiness = Readiness.ASLEEP

    @property
    def is_asleep(self) -> bool:
        return self.readiness is Readiness.ASLEEP

    def check_ready(self) -> None:
        """Raises 503 unless requests are answered. A dead engine is noticed here, before anything polls it."""
        if self.readiness is Readiness.READY and self.engine.dead_reason is not None:
            self.readiness = Readiness.DEAD
        if self.readiness is not Readiness.READY:
            is_ending = self.readiness is Readiness.STOPPING
            raise unavailable(f"Not ready: {self.readiness.value}.", {**RETRY_SOON, **(CLOSE if is_ending else {})})

    def check_progress(self) -> None:
        """The same, for whoever can send requests elsewhere: raises 503 also while the engine stands still."""
        self.check_ready()
        if self.is_standing:
            raise unavailable("Not ready: the engine has work and does nothing.", RETRY_SOON)

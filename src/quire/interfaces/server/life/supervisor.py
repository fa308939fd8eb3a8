"""The supervisor of a server's engine: it watches, and puts a new engine in the place of one that died or stalled.

Judges by progress (engine_client/stall_judge.py). A stalled engine is asked for its stacks, then killed; so all ends
look alike from here on: a crash report, the server not ready, a new engine, the server ready. What was in flight has
heard of it by then, because the engine's client tells every request of its engine's death at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.engine_client.engine_process import EngineProcess
from quire.engine_client.stall_judge import StallJudge
from quire.errors import QuireError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.life.crash_reports import CrashReports
from quire.observability.metrics import ServerMetrics

logger = logging.getLogger("quire.server")

# how often the engine's pulse is felt
LOOK_SECONDS = 0.1
_FIRST_PAUSE = 0.5
_MOST_DOUBLINGS = 6


class RestartPolicy:
    """How often a dead engine is started again: at once, then later and later, and not for ever.

    `most` restarts within `seconds`. Times are of any clock that only goes forward.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._restarts: deque[float] = deque()

    def pause(self, now: float) -> float | None:
        """Seconds to wait before the next start, which is counted with this call; None: it was tried too often."""
        while self._restarts and now - self._restarts[0] >= self._seconds:
            self._restarts.popleft()
        number = len(self._restarts)
        if number >= self._most:
            return None
        self._restarts.append(now)
        return _FIRST_PAUSE * (2.0 ** min(number, _MOST_DOUBLINGS) - 1.0)

    def __str__(self) -> str:
        return f"{self._most} restarts within {self._seconds:g} s"


class Supervisor:
    """Of one engine, from before its start to the end of the server."""

    def __init__(
        self,
        engine: AsyncLLM,
        policy: RestartPolicy,
        reports: CrashReports,
        metrics: ServerMetrics,
        *,
        stall_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._reports = reports
        self._metrics = metrics
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._watched: EngineProcess | None = None
        self._judge = StallJudge(stall_timeout)
        self._stacks = ""
        self._has_stalled = False

    async def watch(self) -> None:
        """For ever: an engine that stalls is killed, also while it loads."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                reason = self._look()
                if reason is not None:
                    await self._end_stalled(reason)
            except Exception:  # whoever watches over others must not fall
                logger.exception("looking after the engine failed")

    async def run(self, on_lost: Callable[[], None], on_ready: Callable[[], None]) -> str:
        """Serves as long as there is an engine; returns why there is none any more. `on_lost` and `on_ready` tell the
        server when it may not, and may, take requests."""
        while True:
            cause = await self._until_lost()
            on_lost()
            while True:
                await self._report(cause)
                pause = self._policy.pause(self._clock())
                if pause is None:
                    return cause
                failure = await self._restart(cause, pause)
                if failure is None:
                    break
                cause = failure
            on_ready()

    async def _until_lost(self) -> str:
        while (reason := self._engine.dead_reason) is None:
            await asyncio.sleep(LOOK_SECONDS)
        return reason

    async def _restart(self, cause: str, pause: float) -> str | None:
        """Why it failed, or None."""
        logger.error("the engine died: %s It is started again%s.", cause, f" in {pause:g} s" if pause else "")
        await asyncio.sleep(pause)
        self._metrics.engine_restarts.add()
        began = self._clock()
        try:
            await self._engine.restart(cause)
        except (QuireError, OSError) as error:
            # a machine without a process or a file to spare may have one in a moment
            return str(error)
        logger.info("the engine serves again after %.1f s", self._clock() - began)
        return None

    async def _report(self, cause: str) -> None:
        kind = "stall" if self._has_stalled else "death"
        self._metrics.engine_deaths.add(1, kind)
        process = self._engine.process
        stacks = self._stacks
        if not stacks and process is not None:
            # may be long, and others are answered meanwhile
            stacks = await asyncio.to_thread(process.stacks)
        facts: dict[str, Any] = {"kind": kind}
        if process is not None:
            pulse = process.pulse()._asdict()
            facts |= {"pid": process.pid, "pulse": pulse, "last_steps": process.last_steps()}
        self._stacks = ""
        self._has_stalled = False
        file = await asyncio.to_thread(self._reports.write, cause, stacks, self._engine.config, facts)
        if file is not None:
            logger.error("crash report: %s", file)

    def _look(self) -> str | None:
        process = self._engine.process
        if process is None or self._engine.dead_reason is not None:
            return None
        if process is not self._watched:
            self._watched, self._judge = process, StallJudge(self._stall_timeout)
        if self._engine.is_running:
            self._judge.seconds_per_token = self._engine.ready.seconds_per_token
        return self._judge.look(self._clock(), process.pulse(), process.num_sent, is_stopped=process.is_stopped)

    async def _end_stalled(self, reason: str) -> None:
        process = self._watched
        assert process is not None
        self._metrics.engine_stalls.add()
        self._has_stalled = True
        logger.error("%s", reason)
        self._stacks = await asyncio.to_thread(process.ask_for_stacks)
        logger.error("what its threads did:\n%s", self._stacks)
        self._engine.kill(reason)

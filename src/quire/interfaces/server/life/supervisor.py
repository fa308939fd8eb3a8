"""The supervisor of a server's engine: it watches, and puts a new engine in the place of one that died or stalled.

Judges by progress (engine_client/stall_judge.py). A stalled engine is asked for its stacks, then killed; so all ends
look alike from here on: a crash report, the server not ready, a new engine, the server ready. What was in flight has
heard of it by then, because the engine's client tells every request of its engine's death at once.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from typing import Any

from quire.engine_client.engine_process import EngineProcess
from quire.engine_client.replica_link import Loss
from quire.engine_client.stall_judge import StallJudge
from quire.errors import QuireError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.life.crash_reports import CrashReports
from quire.interfaces.server.restart_policy import RestartPolicy
from quire.observability.metrics import ServerMetrics
from quire.observability.run_log import log_path, newest

logger = logging.getLogger("quire.server")

# how often the engine's pulse is felt
LOOK_SECONDS = 0.1


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
        on_standing: Callable[[bool], None] = lambda _: None,
        on_replica: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._reports = reports
        self._metrics = metrics
        self._stall_timeout = stall_timeout
        # hears whether all engines stand still
        self._on_standing = on_standing
        # hears of a replica that serves in the place of a dead one
        self._on_replica = on_replica
        self._is_standing = False
        self._clock = clock
        self._judges: dict[EngineProcess, StallJudge] = {}
        # of all replicas together
        self._num_restarts = 0
        # of those that have stalled, what their threads did
        self._stacks: dict[EngineProcess, str] = {}

    async def watch(self) -> None:
        """For ever: an engine that stalls is killed, also while it loads."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                for process, reason in self._look():
                    await self._end_stalled(process, reason)
            except Exception:  # whoever watches over others must not fall
                logger.exception("looking after the engine failed")

    async def tend_replicas(self) -> None:
        """For ever: another replica in the place of one that died while others go on."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            num_restarts = self._num_restarts
            for loss in self._engine.take_losses():
                try:
                    await self._replace(loss, num_restarts)
                except Exception:  # the others must not fall with it
                    logger.exception("replacing replica %d failed", loss.replica)

    async def _replace(self, loss: Loss, num_restarts: int) -> None:
        """`num_restarts`: when the loss was heard of. Whatever replica has its number since the next one is another."""
        await self._report(loss.reason, loss.process, loss.replica)
        while (pause := self._policy.pause(self._clock())) is not None:
            logger.error("replica %d is started again%s", loss.replica, f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
            if self._engine.dead_reason is not None or self._num_restarts != num_restarts:
                return  # the last one has died as well, and all of them are started again
            self._metrics.engine_restarts.add()
            try:
                await self._engine.restart_replica(loss.replica)
            except (QuireError, OSError) as error:
                logger.error("replica %d could not be started: %s", loss.replica, error)
                continue
            self._on_replica(loss.replica)
            logger.info("replica %d serves again", loss.replica)
            return
        logger.error("replica %d is given up: more than %s. The others go on.", loss.replica, self._policy)

    async def run(self, on_lost: Callable[[], None], on_ready: Callable[[], None]) -> str:
        """Serves as long as there is an engine; returns why there is none any more. `on_lost` and `on_ready` tell the
        server when it may not, and may, take requests."""
        while True:
            cause = await self._until_lost()
            on_lost()
            while True:
                await self._report(cause, next(iter(self._engine.processes), None))
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
        self._num_restarts += 1
        self._metrics.engine_restarts.add()
        began = self._clock()
        try:
            await self._engine.restart(cause)
        except (QuireError, OSError) as error:
            # a machine without a process or a file to spare may have one in a moment
            return str(error)
        logger.info("the engine serves again after %.1f s", self._clock() - began)
        return None

    async def _report(self, cause: str, process: EngineProcess | None, replica: int = 0) -> None:
        stacks = self._stacks.pop(process, "") if process is not None else ""
        kind = "stall" if stacks else "death"
        self._metrics.engine_deaths.add(1, kind)
        if not stacks and process is not None:
            # may be long, and others are answered meanwhile
            stacks = await asyncio.to_thread(process.stacks)
        facts: dict[str, Any] = {"kind": kind}
        if process is not None:
            pulse = process.pulse()._asdict()
            facts |= {"pid": process.pid, "pulse": pulse, "last_steps": process.last_steps()}
        facts |= self._way_to_replay(replica)
        file = await asyncio.to_thread(self._reports.write, cause, stacks, self._engine.config, facts)
        if file is not None:
            logger.error("crash report: %s", file)

    def _way_to_replay(self, replica: int) -> dict[str, str]:
        """The log of the engine that has died: the one that follows is not started yet."""
        config = self._engine.config
        if config.record is None:
            return {}
        log = newest(log_path(config.record, replica, config.data_parallel_size))
        if log is None:
            return {}
        command = f"quire replay {shlex.quote(str(log))}"
        logger.error("what it did was recorded: %s", command)
        return {"replay": command}

    def _look(self) -> list[tuple[EngineProcess, str]]:
        """Those that stand still, and for how long."""
        if self._engine.dead_reason is not None:
            return []
        processes = self._engine.processes
        self._judges = {one: self._judges.get(one) or StallJudge(self._stall_timeout) for one in processes}
        stalled = []
        for process, judge in self._judges.items():
            if self._engine.is_running:
                judge.seconds_per_token = self._engine.ready.seconds_per_token
            reason = judge.look(
                self._clock(),
                process.pulse(),
                process.num_sent,
                is_stopped=process.is_stopped,
                processor_seconds=process.processor_seconds,
            )
            if reason is not None:
                stalled.append((process, reason))
        self._tell_of_standing()
        return stalled

    def _tell_of_standing(self) -> None:
        is_standing = bool(self._judges) and all(judge.is_standing for judge in self._judges.values())
        if is_standing != self._is_standing:
            self._is_standing = is_standing
            logger.warning("the engine %s", "has work and does nothing" if is_standing else "goes on")
            self._on_standing(is_standing)

    async def _end_stalled(self, process: EngineProcess, reason: str) -> None:
        self._metrics.engine_stalls.add()
        logger.error("%s", reason)
        self._stacks[process] = await asyncio.to_thread(process.ask_for_stacks) or "no stacks"
        logger.error("what its threads did:\n%s", self._stacks[process])
        if len(self._engine.processes) > 1:
            # its end is seen like any other's, and the other replicas go on
            process.kill()
        else:
            self._engine.kill(reason)

"""The engine that an AsyncLLM holds: started at first need, replaced when it has died, ended once.

Owns the client, the tokenizer and the parts (engine_parts.py). The parts outlive the client: a new engine is brought to
where the old one was. Whoever restarts it decides when another try is due: between two of them that failed, nobody
else starts one. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine_client import AsyncEngineClient, open_link
from quire.errors import EngineDeadError
from quire.interfaces.engine_parts import EngineParts
from quire.interfaces.hooks.engine import AskedEngine, EngineOfHooks
from quire.interfaces.hooks.guarded_client import open_client
from quire.interfaces.hooks.judging import Hooks
from quire.interfaces.setup import log_report
from quire.messages import EngineReady
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine_client.replica_link import Loss
    from quire.renderer import Renderer

Connect = Callable[[EngineConfig], AsyncEngineClient]


def connect(config: EngineConfig, hooks: Hooks) -> AsyncEngineClient:
    """Starts an engine where the configuration wants it: by default in a process of its own."""
    in_own_process = config.engine_process is not False
    return open_client(open_link(config, in_own_process=in_own_process), hooks)


class HeldEngine:
    def __init__(
        self,
        config: EngineConfig,
        defaults: SamplingParams,
        hooks: Hooks,
        renderer: Renderer | None,
        client: AsyncEngineClient | None,
    ) -> None:
        if config.data_parallel_size > 1 and not config.prefix_hash_key:
            # whoever routes to the replicas, here or in another process, names blocks as they do
            config = replace(config, prefix_hash_key=os.urandom(32))
        self.config = config
        self.connect: Connect = partial(connect, hooks=hooks)
        # hears at once of replicas that have died
        self.tell_loss: Callable[[Loss], None] = lambda loss: None
        self._hooks = hooks
        self._are_hooks_open = False
        self.renderer = renderer
        self.client = client
        self.parts: EngineParts | None = None
        # while there is an engine that has started
        self.ready: EngineReady | None = None
        self.is_shut_down = False
        # it was ended by who uses it, to be started again by them
        self.is_asleep = False
        # its end was seen, and no other one serves yet
        self._is_being_replaced = False
        self._losses: list[Loss] = []
        self._defaults = defaults
        self._lock = asyncio.Lock()

    @property
    def running(self) -> AsyncEngineClient:
        """The client, for a request that was prepared; its engine may be gone since."""
        if self.client is None:
            raise self._absent()
        return self.client

    async def start(self, calls: AskedEngine) -> EngineReady:
        """Loads tokenizer and model, unless that is done. Takes the place of no engine that died: restart does."""
        if self.ready is not None:
            return self.ready
        async with self._lock:
            if self.ready is not None:
                return self.ready
            if self._is_being_replaced or self.is_asleep:
                raise self._absent()
            return await self._start(calls)

    async def restart(self, calls: AskedEngine, reason: str) -> EngineReady:
        """Ends what is there, and starts anew. May be called again after it has failed."""
        async with self._lock:
            self._is_being_replaced = True
            await self._end(reason)
            ready = await self._start(calls)
            self._is_being_replaced = False
            self.is_asleep = False
            return ready

    async def sleep(self, reason: str) -> None:
        """Ends what is there until `restart`; nothing else starts another one."""
        async with self._lock:
            self.is_asleep = True
            await self._end(reason)

    async def _end(self, reason: str) -> None:
        client = self.client
        self.client = None
        self.ready = None
        self._losses = []
        if client is not None:
            client.kill(reason)
            await asyncio.to_thread(client.close)

    def take_losses(self) -> list[Loss]:
        losses = self._losses
        self._losses = []
        return losses

    def _lost(self, loss: Loss) -> None:
        self._losses.append(loss)
        self.tell_loss(loss)
        if self.parts is not None:
            self.parts.replica_was_lost()

    async def restart_replica(self, calls: AskedEngine, number: int) -> None:
        async with self._lock:
            await self.running.control("replicas.start", {"number": number})
            assert self.parts is not None
            await self.parts.furnish_replica(calls, number)

    def shutdown(self) -> None:
        self.is_shut_down = True
        if self.parts is not None:
            self.parts.close()
        if self.client is not None:
            self.client.close()
        self._hooks.close()

    async def _start(self, calls: AskedEngine) -> EngineReady:
        if self.is_shut_down:
            raise EngineDeadError("The engine was shut down.")
        try:
            self.ready = await self._open()
            assert self.parts is not None
            await self._open_hooks(calls)
            await self.parts.furnish(calls)
        except BaseException:
            # a cancelled or failed start leaves no process behind
            self.ready = None
            if self.client is not None:
                self.client.close()
                self.client = None
            raise
        return self.ready

    def _absent(self) -> EngineDeadError:
        if self.is_asleep:
            return EngineDeadError("The engine sleeps. Call wake_up first.")
        return EngineDeadError("The engine is gone, and another one has not started yet.")

    async def _open_hooks(self, calls: AskedEngine) -> None:
        """Once, beside the event loop: they may load what they need, and ask the engine."""
        if self._hooks and not self._are_hooks_open:
            await asyncio.to_thread(self._hooks.open, EngineOfHooks(calls, asyncio.get_running_loop()))
            self._are_hooks_open = True

    async def _open(self) -> EngineReady:
        if self.client is None:
            # the core's process starts before the tokenizer is read, so that both load at the same time
            self.client = self.connect(self.config)
        if self.renderer is None:
            from quire.renderer import Renderer

            self.renderer = await asyncio.to_thread(Renderer.from_config, self.config)
        self._hooks.renderer = self.renderer
        self.client.watch_losses(self._lost)
        ready = await self.client.wait_ready()
        log_report(ready)
        if self.parts is None:
            self.parts = EngineParts(self.config, ready, self.renderer, self._defaults)
        else:
            self.parts.engine_was_replaced(ready)
        if self.client.is_in_process and self.config.worker.grid.size == 1:
            self.parts.maker.limits = replace(self.parts.maker.limits, is_here=True)
        return ready

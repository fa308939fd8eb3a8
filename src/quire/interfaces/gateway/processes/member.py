"""A further process of the server: its whole program. It answers HTTP, and does nothing else.

Started by the first process (fleet.py), which owns the engine and says over the channel when there is one, when it is
lost, and when to end. It takes connections from the listening socket that all of them share, from its first engine on,
so that a client never meets one that is still loading. It ends with the first process, whatever that ends of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Any, NoReturn

from quire.config import EngineConfig
from quire.engine_client import AsyncEngineClient, Link
from quire.engine_client.attached_link import AttachedLink
from quire.engine_client.replica_link import ReplicaLink
from quire.errors import EngineDeadError, QuireError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway.app import http_server
from quire.interfaces.gateway.processes.channel import Channel, ChannelClosedError, ChannelError
from quire.interfaces.gateway.processes.document import ProcessDocument
from quire.interfaces.gateway.processes.handing_on import hander_on, is_for_any
from quire.interfaces.gateway.processes.shared_ledger import SharedLedger
from quire.interfaces.gateway.processes.sibling_answers import answers_of, counts_of
from quire.interfaces.hooks.guarded_client import open_client
from quire.interfaces.server.life.process import end_each, loop_factory, set_aside
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.transport.root_path import prefix_of
from quire.observability.logging import configure_logging, flush_log
from quire.processes.documents import read_document
from quire.processes.parent_watch import die_with_parent, watch_parent
from quire.renderer import Renderer

logger = logging.getLogger("quire.server")

# for streams that were interrupted, to send their last event
LAST_WORDS_SECONDS = 0.5
# for the first process to take what this one has counted
_HAND_OVER_SECONDS = 1.0


class _OverChannel:
    """The siblings of a further process: it asks the first one, and that one all others."""

    channel: Channel | None = None

    async def ask(self, name: str, **arguments: Any) -> list[Any]:
        if self.channel is None:
            return []
        try:
            answers: list[Any] = await self.channel.ask("ask_others", name=name, arguments=arguments)
        except (ChannelClosedError, ChannelError):
            return []
        return answers


class Member:
    """One life: loading, serving, ending."""

    def __init__(self, document: ProcessDocument) -> None:
        self._document = document
        self._options = document.options
        self._siblings = _OverChannel()
        self._end = asyncio.Event()
        self._hurry = asyncio.Event()
        self._seconds_to_end = 0.0
        self._has_begun = False
        # to engines that wait, by the number of the replica
        self._links: dict[int, AttachedLink] = {}
        self._joining: dict[int, asyncio.Task[Any]] = {}
        self._starting: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        document = self._document
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.drain)
        role = ProcessRole(
            siblings=self._siblings,
            hand_on=hander_on(socket.socket(fileno=document.connections)),
            is_for_any=partial(is_for_any, prefix=prefix_of(self._options.root_path or "").rstrip("/").encode()),
        )
        ledger = SharedLedger(document.counts, document.seat, document.num_seats, document.tenants)
        listener = socket.socket(fileno=document.listener)
        self._http = http_server(self._options, listener, role=role, ledger=ledger)
        renderer = await asyncio.to_thread(Renderer.from_config, document.config)
        self._engine = AsyncLLM.from_config(document.config, renderer=renderer)
        self._engine._connect = self._connect
        answers = answers_of(self._http.app) | {
            name: getattr(self, name)
            for name in (
                "attach", "serve", "lost", "replica_is_lost", "attach_replica", "serve_replica", "stand", "dead",
                "drain", "hurry",
            )
        }  # fmt: skip
        answers["is_alive"] = lambda: True
        channel = self._siblings.channel = await Channel.over(socket.socket(fileno=document.channel), answers)
        listening = asyncio.ensure_future(channel.run())
        try:
            with set_aside():
                channel.tell("loaded")
                await self._end.wait()
                await self._wait_drained()
        finally:
            if self._starting is not None:
                self._starting.cancel()
            await end_each(HTTP_server=self._http.close, counts=lambda: self._hand_over_counts(channel))
            self._engine.shutdown()
            listening.cancel()

    # ------------------------------------------------------------------------------------------ what the first one says

    def attach(self, folders: dict[int, str]) -> bool:
        """There are engines, by number. Waits for each in its folder from now on."""
        if self._starting is not None:
            self._starting.cancel()
        for link in self._links.values():
            link.close()
        self._links = {number: AttachedLink(folder) for number, folder in folders.items()}
        self._starting = asyncio.ensure_future(self._start())
        return True

    async def serve(self) -> bool:
        """When the engine of the last `attach` answers."""
        starting = self._starting
        if starting is None:
            return False
        # another engine may take the place of this one meanwhile
        await asyncio.wait({starting})
        return not starting.cancelled() and starting.result()

    async def replica_is_lost(self, number: int, reason: str) -> bool:
        """One of several; says whether this process still has others. It may not have met a successor yet."""
        if self._engine.is_running:
            with contextlib.suppress(EngineDeadError):
                await self._engine.control("replicas.lose", {"number": number, "reason": reason})
            if self._engine.errored:
                self._http.pause()
        elif self._starting is not None:
            # it waits for all of them
            self._starting.cancel()
        return not self._engine.errored

    def attach_replica(self, number: int, folder: str) -> bool:
        """Another one in the place of one that was lost. Waits for it in this folder from now on."""
        self._links[number] = AttachedLink(folder)
        starting = self._engine.control("replicas.start", {"number": number})
        self._joining[number] = asyncio.ensure_future(starting)
        return True

    async def serve_replica(self, number: int) -> None:
        """When the engine of the last `attach_replica` answers. Its owner has brought it to where the others are."""
        await self._joining.pop(number)
        await self._engine.control("replicas.serve", {"number": number})
        self._engine.take_losses()

    def lost(self, cause: str) -> None:
        """The engine is gone. What is in flight hears of it now."""
        self._http.pause()
        self._engine.kill(cause)

    def stand(self, is_standing: bool) -> None:
        """The engine has work and does nothing, or it goes on."""
        self._http.stand(is_standing)

    def dead(self, cause: str) -> None:
        """It does not come back."""
        self._http.die()
        self._engine.kill(cause)
        self._seconds_to_end = LAST_WORDS_SECONDS
        self._end.set()

    def drain(self) -> None:
        """New requests are refused, running ones may go on for a while."""
        self._http.drain()
        self._http.stop_listening()
        self._seconds_to_end = self._options.shutdown_timeout
        self._end.set()

    def hurry(self) -> None:
        self._hurry.set()

    # ------------------------------------------------------------------------------------------ inside

    def _connect(self, config: EngineConfig) -> AsyncEngineClient:
        if not self._links:
            raise EngineDeadError("The engine is gone, and another one has not started yet.")
        if config.data_parallel_size == 1:
            link: Link = self._links.pop(0)
        else:
            link = ReplicaLink(config, self._link_to, sorted(self._links))
        return open_client(link, self._engine.hooks)

    def _link_to(self, replica: EngineConfig) -> AttachedLink:
        return self._links.pop(replica.replica)

    async def _start(self) -> bool:
        try:
            await self._engine.restart()
        except QuireError as error:
            logger.warning("this process has no engine: %s", error)
            return False
        self._http.attach(self._engine)
        if not self._has_begun:
            self._has_begun = True
            self._http.start()
        return True

    async def _hand_over_counts(self, channel: Channel) -> None:
        """They outlive this process. Nothing is counted any more."""
        with contextlib.suppress(TimeoutError, ChannelClosedError, ChannelError):
            async with asyncio.timeout(_HAND_OVER_SECONDS):
                await channel.ask("last_counts", answers=counts_of(self._http.app))

    async def _wait_drained(self) -> None:
        idle = self._http.wait_idle(self._seconds_to_end)
        hurry = self._hurry.wait()
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(idle), asyncio.ensure_future(hurry)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def main() -> NoReturn:
    die_with_parent()
    document = read_document(sys.stdin.buffer, ProcessDocument)
    watch_parent()
    configure_logging(in_background=True, process=f"process {document.seat}")
    status = 0
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(Member(document).run())
    except Exception:
        logger.exception("a process of the server failed")
        status = 1
    flush_log()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries have no say in how long the end takes.
    os._exit(status)

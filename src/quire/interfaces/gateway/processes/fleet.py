"""The further processes of a server, as the first one sees them: started, told of the engine, started again, ended.

The first process owns the engine; what it says of it reaches them over a channel each. One that ends by itself, or
stands still and is killed, takes nobody with it: the engine is told to abort what it had open, what it had in use is
free again, and another one takes its seat, at once, then later and later. A seat is for the life of the server, a
number for the life of one process: it stands in the ids of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine_client.replica_link import Loss
from quire.engine_client.socket_link import endpoint_in, fresh_folder
from quire.errors import QuireError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.engine_calls import EngineCalls, OfReplica
from quire.interfaces.gateway.access.doors import doors_of
from quire.interfaces.gateway.processes.channel import Answers, Channel, ChannelClosedError, ChannelError
from quire.interfaces.gateway.processes.document import ProcessDocument
from quire.interfaces.gateway.processes.handing_on import HandedOn
from quire.interfaces.gateway.processes.kept_counts import Answer, KeptCounts
from quire.interfaces.gateway.processes.shared_ledger import SharedLedger, make_page
from quire.interfaces.gateway.processes.sibling_answers import answers_of
from quire.interfaces.server.http_server import HttpServer
from quire.interfaces.server.options import ServerOptions
from quire.messages import MOST_CLIENTS
from quire.processes.child_process import ChildProcess
from quire.processes.documents import encode_document
from quire.processes.nameless_file import nameless_file

logger = logging.getLogger("quire.server")

# an answer that comes later is left out
_ANSWER_SECONDS = 2.0
# between the end of a process and the start of its successor: nothing, then this, doubled each time
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 32.0
# One that has lived so long did not die of its start.
_GOOD_AGE_SECONDS = 60.0
# One that answers nothing, asked so often so long after each other, stands still.
_LOOK_SECONDS = 5.0
_MOST_MISSES = 3
# One that is looked at so often and still loads will never be ready: five minutes for seconds of work.
_MOST_LOOKS_WHILE_IT_LOADS = 60
# with processes that neither serve nor end; then the others serve without them
_PATIENCE_SECONDS = 60.0

# somebody has sent it SIGTERM, which it knows how to take once it has loaded
_ENDED_IN_ORDER = "exit status 0"
_ASKED_TO_END = (_ENDED_IN_ORDER, "signal SIGTERM")

Adopt = Callable[[socket.socket, bytes], Awaitable[None]]

_PROGRAM = "quire.interfaces.gateway.processes.member"


class Process:
    """One further process, as the first one holds it: from its start to its end."""

    def __init__(self, number: int, document: ProcessDocument) -> None:
        """Blocks until it has been started."""
        self.number = number
        self.seat = document.seat
        self.is_loaded = False
        self.is_attached = False
        # where it waits for engines, until they have met
        self.folders: list[str] = []
        # given by whoever starts it
        self.channel: Channel
        self.child = ChildProcess(encode_document(document), [], document.descriptors, program=_PROGRAM)

    async def wait_end(self) -> str:
        """How it ended. To be waited for once."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.child.end_descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.child.end_descriptor)
        return self.child.how_it_ended()

    def kill(self) -> None:
        """At once, and all that it has started."""
        if not self.child.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)


class Fleet:
    """All of them. Belongs to the event loop of the first process."""

    def __init__(
        self,
        document: Callable[[int], ProcessDocument],
        engine: AsyncLLM,
        ledger: SharedLedger,
        files: Sequence[int] = (),
        num_replicas: int = 1,
    ) -> None:
        """`document` of a seat, but for the channel and the connections. `files`: descriptors to close at the end."""
        self._num_replicas = num_replicas
        self._document = document
        self._engine = engine
        self._ledger = ledger
        self._files = files
        self._answers: Answers = {}
        self._adopt: Adopt = _adopt_nothing
        self._on_death: Callable[[], None] = _count_nothing
        self._processes: dict[int, Process] = {}
        self._counts = KeptCounts()
        self._seats: list[asyncio.Task[None]] = []
        # by seat: its first process serves, or has ended
        self._settled = [asyncio.Event() for _ in range(1, ledger.num_processes)]
        self._attaching: set[asyncio.Task[None]] = set()
        self._number = 0
        self._has_engine = False
        # those that serve, where there are several engines
        self._replicas = set(range(num_replicas))
        self._ending = asyncio.Event()

    @property
    def num_serving(self) -> int:
        return sum(process.is_attached for process in self._processes.values())

    def start(self, http: HttpServer) -> None:
        """`http`: the first process's own, which takes connections that are handed on."""
        self._answers = answers_of(http.app)
        self._adopt = http.adopt
        self._on_death = http.metrics.api_process_deaths.add
        http.metrics.api_processes.read = lambda: 1 + self.num_serving
        if self._num_replicas > 1:
            self._engine.watch_losses(self._replica_is_lost)
        self._seats = [asyncio.create_task(self._keep(seat)) for seat in range(1, self._ledger.num_processes)]

    # ------------------------------------------------------------------------------------------ the engine

    async def engine_is_ready(self) -> None:
        """Returns when every seat serves, or its process has ended."""
        self._has_engine = True
        await asyncio.gather(*(self._attach(one) for one in list(self._processes.values()) if one.is_loaded))
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                for settled in self._settled:
                    await settled.wait()
        except TimeoutError:
            num_missing = sum(not settled.is_set() for settled in self._settled)
            logger.warning("%d processes do not serve yet; the others begin without them", num_missing)

    def engine_is_back(self) -> None:
        """After `engine_is_lost`: they serve as soon as they can."""
        self._has_engine = True
        for process in self._processes.values():
            if process.is_loaded:
                self._begin(self._attach(process))

    def engine_is_lost(self, cause: str) -> None:
        self._has_engine = False
        # it comes back as a whole
        self._replicas = set(range(self._num_replicas))
        for process in self._processes.values():
            process.is_attached = False
            process.channel.tell("lost", cause=cause)

    def _replica_is_lost(self, loss: Loss) -> None:
        self._replicas.discard(loss.replica)
        for process in self._processes.values():
            self._begin(self._lose(process, loss))

    async def _lose(self, process: Process, loss: Loss) -> None:
        try:
            has_others = await process.channel.ask("replica_is_lost", number=loss.replica, reason=loss.reason)
        except (ChannelClosedError, ChannelError) as error:
            logger.debug("process %d was not told of a loss: %s", process.seat, error)
            return
        if not has_others and process.is_attached:
            process.is_attached = False
            await self._attach(process)

    def replica_is_back(self, number: int) -> None:
        """Another one serves in the place of one that was lost."""
        self._replicas.add(number)
        for process in self._processes.values():
            if process.is_attached:
                self._begin(self._bring_back(process, number))

    def engine_stands(self, is_standing: bool) -> None:
        """It has work and does nothing, or it goes on."""
        for process in self._processes.values():
            process.channel.tell("stand", is_standing=is_standing)

    # ------------------------------------------------------------------------------------------ asking

    async def ask(self, name: str, **arguments: Any) -> list[Any]:
        """The siblings of the first process."""
        return await self._ask_all_but(None, name, arguments)

    async def _ask_all_but(self, asker: Process | None, name: str, arguments: dict[str, Any]) -> list[Any]:
        is_counted = name in self._counts.names
        # who asks for counts shows its own with the answers, so that they are kept as well
        asked = [one for one in self._processes.values() if one.is_loaded and (is_counted or one is not asker)]
        answers = await asyncio.gather(*(self._ask(process, name, arguments) for process in asked))
        answer_of = {one.number: answer for one, answer in zip(asked, answers, strict=True) if answer is not None}
        if is_counted:
            return self._counts.answers(name, answer_of, None if asker is None else asker.number)
        return list(answer_of.values())

    async def _ask(self, process: Process, name: str, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await process.channel.ask(name, **arguments)
        except (TimeoutError, ChannelClosedError, ChannelError) as error:
            logger.warning(
                "process %d was asked for %s and gave no answer: %s", process.seat, name, str(error) or "no time"
            )
            return None
        if name in self._counts.names:
            self._keep_counts(process, {name: answer})
        return answer

    def _keep_counts(self, process: Process, answers: dict[str, Answer]) -> None:
        # one that was buried meanwhile is counted as it was then
        if process.number in self._processes:
            for name, answer in answers.items():
                self._counts.saw(process.number, name, answer)

    # ------------------------------------------------------------------------------------------ ending

    def drain(self) -> None:
        self._tell_the_end("drain")

    def hurry(self) -> None:
        self._tell_the_end("hurry")

    def die(self, cause: str) -> None:
        self._tell_the_end("dead", cause=cause)

    async def wait_gone(self) -> None:
        """After `drain`, until all have ended."""
        if self._seats:
            await asyncio.wait(self._seats)

    async def close(self) -> None:
        """Ends what is left by force."""
        self._ending.set()
        for task in self._attaching:
            task.cancel()
        for process in self._processes.values():
            process.kill()
        await self.wait_gone()
        for file in self._files:
            os.close(file)

    def _tell_the_end(self, how: str, **arguments: Any) -> None:
        self._ending.set()
        for process in self._processes.values():
            process.channel.tell(how, **arguments)

    # ------------------------------------------------------------------------------------------ one seat

    async def _keep(self, seat: int) -> None:
        """A process on this seat as long as the server lives."""
        loop = asyncio.get_running_loop()
        num_early_deaths = 0
        while not self._ending.is_set():
            began = loop.time()
            try:
                how = await self._live(seat)
            except (OSError, RuntimeError) as error:
                # a machine without a process, a thread (RuntimeError) or a file to spare may have one in a moment
                how = str(error)
            self._settled[seat - 1].set()
            if self._ending.is_set():
                return
            was_asked = how in _ASKED_TO_END
            if not was_asked:
                self._on_death()
            num_early_deaths = 0 if loop.time() - began > _GOOD_AGE_SECONDS else num_early_deaths + 1
            pause = min(_FIRST_PAUSE * (2.0 ** (num_early_deaths - 1) - 1.0), _LONGEST_PAUSE) if num_early_deaths else 0
            again = f" in {pause:g} s" if pause else ""
            lost = "" if was_asked else "; its requests are lost"
            level = logging.INFO if was_asked else logging.ERROR
            logger.log(level, "process %d ended (%s)%s. It is started again%s.", seat, how, lost, again)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)

    async def _live(self, seat: int) -> str:
        """The life of one process; returns how it ended."""
        process, connections = await self._launch(seat)
        self._processes[process.number] = process
        handed = HandedOn(connections, self._adopt)
        tasks = [
            asyncio.create_task(process.channel.run()),
            asyncio.create_task(self._kill_if_it_stands_still(process)),
        ]
        if self._ending.is_set():
            process.channel.tell("drain")
        how = await process.wait_end()
        handed.close()
        for task in tasks:
            task.cancel()
        await self._bury(process)
        return how

    async def _kill_if_it_stands_still(self, process: Process) -> None:
        # looks are counted and not seconds: those in which this process itself stood still are nobody's fault
        num_misses = num_looks = 0
        while num_misses < _MOST_MISSES and (process.is_loaded or num_looks < _MOST_LOOKS_WHILE_IT_LOADS):
            await asyncio.sleep(_LOOK_SECONDS)
            num_looks += 1
            if process.is_loaded:
                try:
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await process.channel.ask("is_alive")
                    num_misses = 0
                    for name in self._counts.names:
                        await self._ask(process, name, {})
                except (TimeoutError, ChannelError):
                    num_misses += 1
                except ChannelClosedError:
                    return
        seconds = _LOOK_SECONDS * (2 * _MOST_MISSES if process.is_loaded else num_looks)
        how = "stands still" if process.is_loaded else "has not loaded"
        logger.error("process %d (pid %d) %s for %g s and is killed", process.seat, process.child.pid, how, seconds)
        process.kill()

    async def _launch(self, seat: int) -> tuple[Process, socket.socket]:
        ours, theirs = socket.socketpair()
        to_first, from_other = socket.socketpair()
        number = self._free_number()
        document = self._document(seat)
        document.channel, document.connections = theirs.fileno(), to_first.fileno()
        try:
            process = await asyncio.to_thread(Process, number, document)
        except BaseException:
            for one in (ours, from_other):
                one.close()
            raise
        finally:
            theirs.close()
            to_first.close()

        async def ask_others(name: str, arguments: dict[str, Any]) -> list[Any]:
            own = self._answers[name](**arguments)
            return [own, *await self._ask_all_but(process, name, arguments)]

        def loaded() -> None:
            process.is_loaded = True
            # somebody may have changed it since the server began
            process.channel.tell("log_level", level=logging.getLogger("quire").getEffectiveLevel())
            if self._has_engine:
                self._begin(self._attach(process))

        def last_counts(answers: dict[str, Answer]) -> None:
            self._keep_counts(process, answers)

        heard: Answers = {"loaded": loaded, "ask_others": ask_others, "last_counts": last_counts}
        process.channel = await Channel.over(ours, heard)
        return process, from_other

    async def _bury(self, process: Process) -> None:
        del self._processes[process.number]
        process.channel.close()
        for folder in process.folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._ledger.wipe(process.seat)
        self._counts.buried(process.number)
        # it has ended, so this does not wait
        await asyncio.to_thread(process.child.close)
        if self._has_engine:
            try:
                await self._engine.control("clients.close", {"number": process.number})
            except QuireError as error:
                logger.debug("the engine is gone as well: %s", error)

    def _free_number(self) -> int:
        """Not one that an output on its way could still be meant for."""
        while True:
            self._number = self._number % (MOST_CLIENTS - 1) + 1
            if self._number not in self._processes:
                return self._number

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, process: Process) -> None:
        """Brings a process and the engines together. A single engine that is lost meanwhile comes back, and this is
        done again then; of several the others go on."""
        while self._has_engine and not await self._has_met(process, sorted(self._replicas)):
            if self._num_replicas == 1:
                return
            await asyncio.sleep(_FIRST_PAUSE)

    async def _has_met(self, process: Process, replicas: list[int]) -> bool:
        """Also one that is gone has nothing to wait for."""
        folders = {number: fresh_folder() for number in replicas}
        process.folders += folders.values()
        try:
            await process.channel.ask("attach", folders=folders)
            await self._engine.control("clients.close", {"number": process.number})
            for number, folder in folders.items():
                await self._open_client(process, number, folder)
            if not await process.channel.ask("serve"):
                return False
            process.is_attached = True
            logger.info("process %d (pid %d) serves", process.seat, process.child.pid)
            self._settled[process.seat - 1].set()
            for number in sorted(self._replicas.difference(replicas)):
                self._begin(self._bring_back(process, number))
        except ChannelClosedError:
            return True
        except (ChannelError, QuireError) as error:
            # an engine ended: who watches over it has seen it
            logger.debug("process %d has not met the engine: %s", process.seat, error)
            return False
        finally:
            self._remove(process, folders.values())
        return True

    async def _bring_back(self, process: Process, number: int) -> None:
        """Brings a process together with a replica that has taken the place of another one."""
        folder = fresh_folder()
        process.folders.append(folder)
        try:
            await process.channel.ask("attach_replica", number=number, folder=folder)
            await self._open_client(process, number, folder)
            await process.channel.ask("serve_replica", number=number)
        except (ChannelClosedError, ChannelError, QuireError) as error:
            # one of both ended; a replica that is lost again comes back again
            logger.debug("process %d has not met replica %d: %s", process.seat, number, error)
        finally:
            self._remove(process, [folder])

    def _remove(self, process: Process, folders: Collection[str]) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        process.folders = [folder for folder in process.folders if folder not in folders]

    async def _open_client(self, process: Process, replica: int, folder: str) -> None:
        engine: EngineCalls = self._engine if self._num_replicas == 1 else OfReplica(self._engine, replica)
        await engine.control("clients.open", {"number": process.number, "endpoint": endpoint_in(folder)})


async def _adopt_nothing(connection: socket.socket, data: bytes) -> None:
    connection.close()


def _count_nothing() -> None: ...


_FIRST_SEAT = 0


def open_fleet(
    options: ServerOptions, config: EngineConfig, listener: socket.socket, engine: AsyncLLM
) -> tuple[Fleet, SharedLedger]:
    """Nothing is started yet. The ledger is for the first process, whose siblings the fleet is."""
    num_seats = options.api_server_count
    tenants = list(doors_of(options).tenants.by_name)
    page = make_page(num_seats, tenants)
    # what is pinned and loaded at the start is the first process's
    config = replace(config, pinned_prefixes=None, lora_modules=())
    keys, options = _with_kept_keys(options)

    def document(seat: int) -> ProcessDocument:
        return ProcessDocument(
            config=config,
            options=options,
            seat=seat,
            num_seats=num_seats,
            tenants=tenants,
            listener=listener.fileno(),
            channel=-1,
            connections=-1,
            counts=page,
            keys=keys,
        )

    ledger = SharedLedger(page, _FIRST_SEAT, num_seats, tenants)
    files = [page] if keys is None else [page, keys]
    fleet = Fleet(document, engine, ledger, files, config.data_parallel_size)
    return fleet, ledger


def _with_kept_keys(options: ServerOptions) -> tuple[int | None, ServerOptions]:
    """A process that is started later knows the same keys, whatever has become of their file."""
    if options.api_key_file is None:
        return None, options
    descriptor = nameless_file("quire-keys", Path(options.api_key_file).read_bytes())
    os.fchmod(descriptor, 0o600)
    return descriptor, replace(options, api_key_file=f"/dev/fd/{descriptor}")

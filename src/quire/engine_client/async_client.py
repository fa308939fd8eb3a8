"""The engine client: many requests at once on one event loop, one reader for all of them.

Owns the mailboxes and the calls that wait for a reply. Everything here runs on the event loop's thread; the link says
which files to watch, so there is no thread and no lock between the socket and the reader of a stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from quire.engine_client.deltas import TokenDelta
from quire.engine_client.engine_process import EngineProcess
from quire.engine_client.in_thread import InThreadLink
from quire.engine_client.link import Link, error_of
from quire.engine_client.mailbox import Mailbox, Mailboxes
from quire.engine_client.stream import RequestStream, items_of
from quire.errors import EngineDeadError, EngineError
from quire.messages import (
    AbortRequests,
    ControlCall,
    ControlReply,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    ToClient,
    ToCore,
    sequence_id_of,
)

if TYPE_CHECKING:
    from quire.engine_client.replica_link import Loss

logger = logging.getLogger(__name__)


class AsyncEngineClient:
    """Tokens in, tokens out. May be made outside a loop; it follows the loop of its first caller."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._owner = os.getpid()
        self._mailboxes = mailboxes = Mailboxes()
        link.keep_back_while(lambda: mailboxes.num_eager == 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        # `_drain` will be called in the loop's next turn
        self._is_drain_due = False
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._start: asyncio.Future[EngineReady] | None = None
        self._ready: EngineReady | None = None
        self._failure: EngineFailed | None = None

    @property
    def ready(self) -> EngineReady:
        if self._ready is None:
            raise EngineError("The engine was not started yet: await wait_ready() first.")
        return self._ready

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._failure.error if self._failure is not None else None

    @property
    def processes(self) -> tuple[EngineProcess, ...]:
        """The engine's process, if it has one of its own; those of its replicas, if it has several."""
        return self._link.processes

    @property
    def is_in_process(self) -> bool:
        """What is sent arrives as it is, functions included."""
        return isinstance(self._link, InThreadLink)

    def watch_losses(self, tell: Callable[[Loss], None]) -> None:
        """Has `tell` called when a replica has died and others go on."""
        self._link.watch_losses(tell)

    @property
    def num_open(self) -> int:
        return len(self._mailboxes)

    @property
    def num_image_bytes(self) -> int:
        """Of the images of all that is open."""
        return self._mailboxes.num_image_bytes

    def is_open(self, request_id: int) -> bool:
        """Whether somebody reads this request."""
        return request_id in self._mailboxes

    async def wait_ready(self) -> EngineReady:
        """Waits until the core is built; raises what its building raised."""
        self._follow_loop()
        self._drain()
        if self._ready is None:
            if self._failure is not None:
                raise error_of(self._failure)
            if self._start is None:
                self._start = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._start)
        return self.ready

    def open(self, request: EngineRequest) -> RequestStream:
        """Sends a request. Its stream must be closed, which aborts what has not ended."""
        [stream] = self.open_all([request])
        return stream

    def open_all(self, requests: Sequence[EngineRequest], at_end: Collection[int] = ()) -> Sequence[RequestStream]:
        """Sends requests that begin together. The readers of those whose ids are `at_end` are told when all their
        sequences have ended, or nothing more will come; until then they take nothing."""
        self._follow_loop()
        self._check_alive()
        boxes: list[Mailbox] = []
        try:
            for request in requests:
                number = request.request_id
                is_at_end = number in at_end
                box = self._mailboxes.open(number, request.sampling.n, self._close_box, hears_ends_only=is_at_end)
                boxes.append(box)
                if request.media:
                    self._mailboxes.note_images(number, sum(len(image.pixels) for image in request.media))
            self._send(*requests)
        except BaseException:
            for box in boxes:
                self._mailboxes.close(box.request_id)
            raise
        return boxes

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        """New tokens as they come. A reader that goes away aborts the request."""
        stream = self.open(request)
        try:
            async for delta in items_of(stream):
                yield delta
        finally:
            await stream.aclose()

    def _close_box(self, box: Mailbox) -> None:
        if self._mailboxes.close(box.request_id) and box.open_indices and self._failure is None:
            self._send(AbortRequests(request_ids=[box.request_id]))

    def extend(self, request_id: int, token_ids: list[int], *, is_final: bool = False) -> None:
        """More prompt tokens of a request that was made with is_final=False."""
        self._check_alive()
        self._send(ExtendRequest(request_id=request_id, token_ids=token_ids, is_final=is_final))

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Ends a request: its reader gets finish reason "abort". With `index`: drops one sequence, which its reader
        has ended itself (a stop string) and will hear nothing more of."""
        if index is not None:
            # also of a dead engine's request, which has then ended, and does not fail
            self._mailboxes.close_sequence(request_id, index)
        if self._failure is not None:
            return
        if index is None:
            self._send(AbortRequests(request_ids=[request_id]))
        else:
            self._send(AbortRequests(sequence_ids=[sequence_id_of(request_id, index)]))

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        """A management operation of the core, and its result."""
        self._follow_loop()
        self._check_alive()
        call = ControlCall(call_id=next(self._call_ids), name=name, args=args or {})
        future = self._calls[call.call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(call)
            return await future
        finally:
            del self._calls[call.call_id]

    def statistics(self) -> dict[str, float]:
        return {**self._mailboxes.statistics(), **self._link.statistics()}

    def kill(self, reason: str) -> None:
        """Ends an engine's process by force. What is in flight raises EngineDeadError with this reason, at once."""
        for process in self._link.processes:
            process.kill()
        self._die(EngineFailed(kind=EngineDeadError.__name__, error=reason))

    def close(self) -> None:
        """Ends the engine; what is in flight raises EngineDeadError. Blocks for as long as the core needs to end.
        Without effect in a fork of the process that opened it, whose engine it would take away."""
        if os.getpid() != self._owner:
            return
        self._die(EngineFailed(kind=EngineDeadError.__name__, error="The engine was shut down."))
        self._link.close()

    def _follow_loop(self) -> None:
        """Watches the link from the running loop; another one than last time if that has ended."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self._failure is not None:
            return
        if self._loop is not None and not self._loop.is_closed():
            if len(self._mailboxes):
                raise EngineError("This engine serves requests of another event loop. Make one engine per loop.")
            self._unwatch()
        self._loop = loop
        self._start = None
        for descriptor in self._link.descriptors():
            loop.add_reader(descriptor, self._drain)
        # what came while no loop watched has made its noise already
        self._is_drain_due = False
        self._drain_soon(loop)

    def _unwatch(self) -> None:
        loop = self._loop
        self._loop = None
        if loop is not None and not loop.is_closed():
            for descriptor in self._link.descriptors():
                loop.remove_reader(descriptor)

    def _send(self, *messages: ToCore) -> None:
        self._link.send(*messages)
        if self._loop is not None and not self._loop.is_closed():
            # Sending may swallow the signal that something has arrived (ZeroMQ's descriptor is edge-triggered).
            self._drain_soon(self._loop)

    def _drain_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once for all that is sent in this turn: with hundreds of streams a step that has ended meanwhile takes ten
        milliseconds, and there would be another one for every message."""
        if not self._is_drain_due:
            self._is_drain_due = True
            loop.call_soon(self._drain_now)

    def _drain_now(self) -> None:
        self._is_drain_due = False
        self._drain()

    def _drain(self) -> None:
        if self._failure is not None:
            return
        filled: list[Mailbox] = []
        for message in self._link.receive(0):
            if isinstance(message, EngineOutputs):
                filled += self._mailboxes.deliver(message)
            else:
                self._take(message)
        # when all is sorted in: what came together is taken together
        for box in filled:
            _tell(box)

    def _take(self, message: ToClient) -> None:
        match message:
            case ControlReply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    _answer(future, message)
            case EngineReady():
                self._ready = message
                if self._start is not None and not self._start.done():
                    self._start.set_result(message)
            case EngineFailed():
                self._die(message)

    def _die(self, failure: EngineFailed) -> None:
        if self._failure is not None:
            return
        self._unwatch()
        self._failure = failure
        for box in self._mailboxes.boxes():
            box.failure = failure.error
            _tell(box)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(failure.error))
        if self._start is not None and not self._start.done():
            self._start.set_exception(error_of(failure))
            # whoever waited may be gone; then nobody is to be told that the exception was never looked at
            self._start.exception()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure.error)


def _tell(box: Mailbox) -> None:
    try:
        box.on_news()
    except Exception:
        # one reader's mistake must not keep the others waiting
        logger.exception("the reader of request %d failed when it was told that something had come", box.request_id)


def _answer(future: asyncio.Future[Any], reply: ControlReply) -> None:
    if reply.error is None:
        future.set_result(reply.result)
    else:
        future.set_exception(EngineError(reply.error))

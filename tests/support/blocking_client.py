"""A client that blocks: for tests that look at links and cores without an event loop. One thread at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from quire.engine_client.deltas import TokenDelta
from quire.engine_client.link import Link, error_of
from quire.engine_client.mailbox import Mailbox, Mailboxes
from quire.errors import EngineDeadError, EngineError
from quire.messages import (
    AbortRequests,
    ControlCall,
    ControlReply,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ToClient,
    sequence_id_of,
)


class BlockingClient:
    """Tokens in, tokens out, blocking."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._mailboxes = Mailboxes()
        self._call_ids = itertools.count()
        self._unread: list[Mailbox] = []
        self._replies: dict[int, ControlReply] = {}
        self._failure: str | None = None
        self.ready = self._wait_ready()

    @property
    def num_open(self) -> int:
        return len(self._mailboxes)

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._failure

    def add(self, request: EngineRequest) -> None:
        self._check_alive()
        self._mailboxes.open(request.request_id, request.sampling.n)
        self._link.send(request)

    def receive(self) -> list[tuple[int, TokenDelta]]:
        """(request_id, delta) of all that has come; waits for something."""
        while not self._unread:
            self._check_alive()
            self._take_all(self._link.receive(None))
        unread = self._unread
        self._unread = []
        deltas = []
        for box in unread:
            deltas += [(box.request_id, delta) for delta in box.take()]
            if box.is_done:
                self._mailboxes.close(box.request_id)
        return deltas

    def abort(self, request_ids: Iterable[int]) -> None:
        """Nothing more comes for these requests."""
        ids = list(request_ids)
        for request_id in ids:
            self._mailboxes.close(request_id)
        if ids and self._failure is None:
            self._link.send(AbortRequests(request_ids=ids))

    def abort_sequence(self, request_id: int, index: int) -> None:
        """Nothing more comes for this sequence; the request is done when all of its sequences are."""
        self._mailboxes.close_sequence(request_id, index)
        self._link.send(AbortRequests(sequence_ids=[sequence_id_of(request_id, index)]))

    def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        """A management operation, and its result."""
        call = ControlCall(call_id=next(self._call_ids), name=name, args=args or {})
        self._link.send(call)
        while call.call_id not in self._replies:
            self._check_alive()
            self._take_all(self._link.receive(None))
        reply = self._replies.pop(call.call_id)
        if reply.error is not None:
            raise EngineError(reply.error)
        return reply.result

    def statistics(self) -> dict[str, float]:
        return {**self._mailboxes.statistics(), **self._link.statistics()}

    def close(self) -> None:
        self._failure = self._failure or "The engine was shut down."
        self._link.close()

    def _wait_ready(self) -> EngineReady:
        try:
            [first, *_] = self._link.receive(None)
        except BaseException:
            # Ctrl-C while the model loads must leave no process behind
            self._link.close()
            raise
        if isinstance(first, EngineReady):
            return first
        self._link.close()
        if isinstance(first, EngineFailed):
            raise error_of(first)
        raise EngineError(f"The engine core began with a {type(first).__name__} instead of EngineReady.")

    def _take_all(self, messages: list[ToClient]) -> None:
        for message in messages:
            match message:
                case EngineOutputs():
                    self._unread += self._mailboxes.deliver(message)
                case ControlReply():
                    self._replies[message.call_id] = message
                case EngineFailed():
                    self._failure = message.error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

"""Requests that are being answered, how one is ended from outside, and what ended those that did not end themselves.

A request is ended for a cause: its client went away, the server stops, the engine died. The cause is raised inside the
request's own task, so that every `finally` on the way runs and the engine is told to abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from quire.errors import EngineDeadError
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError

Receive = Callable[[], Awaitable[Any]]
_T = TypeVar("_T")


class Ticket:
    """One request that is being answered. `request_id`: that of its answer's header x-request-id."""

    def __init__(self, task: asyncio.Task[Any], request_id: str = "", *, is_awaited: bool = True) -> None:
        self.request_id = request_id
        self.task = task
        self.is_awaited = is_awaited
        self._cause: Exception | None = None
        self.kind = ""

    def interrupt(self, cause: Exception, kind: str = "shutdown") -> None:
        """Raises `cause` in the request's task; the first cause counts. `kind`: what the metrics call it."""
        if not self.kind:
            self._cause = cause
            self.kind = cause.kind if isinstance(cause, ClientGoneError) else kind
            self.task.cancel()

    def take_cause(self) -> Exception:
        """It is not kept: raised, it knows frames that know the ticket, and they would all wait for the collector."""
        cause = self._cause
        self._cause = None
        assert cause is not None
        return cause


_TICKET: ContextVar[Ticket | None] = ContextVar("ticket", default=None)


def current_ticket() -> Ticket | None:
    """Of the request that is being answered in this context."""
    return _TICKET.get()


def _ticket_of(task: asyncio.Task[Any] | None) -> Ticket | None:
    """Of this task itself: one that a request has started knows its ticket, too."""
    ticket = _TICKET.get()
    return ticket if ticket is not None and ticket.task is task else None


class InFlight:
    """All tickets of a server."""

    def __init__(self, on_abort: Callable[[str], None] = lambda kind: None) -> None:
        """`on_abort` hears of each request that ended before its end, and of what kind its end was."""
        self._on_abort = on_abort
        self._tickets: dict[int, Ticket] = {}
        self._num_awaited = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._tickets)

    @contextmanager
    def enter(self, *, is_awaited: bool = True) -> Iterator[Ticket]:
        """Registers the running task; an interrupt inside the body leaves it as its cause. `is_awaited`: `wait_empty`
        waits for it. A ticket that the task has already is put aside meanwhile, for a task can be interrupted once."""
        task = asyncio.current_task()
        assert task is not None
        ticket = Ticket(task, current_caller().request_id, is_awaited=is_awaited)
        outer = _ticket_of(task)
        if outer is not None:
            self._remove(outer)
        self._add(ticket)
        token = _TICKET.set(ticket)
        try:
            yield ticket
        except asyncio.CancelledError:
            if not ticket.kind:
                raise
            task.uncancel()
            self._on_abort(ticket.kind)
            raise ticket.take_cause() from None
        except EngineDeadError:
            self._on_abort("engine_restarted")
            raise
        finally:
            _TICKET.reset(token)
            self._remove(ticket)
            if outer is not None:
                self._add(outer)

    def _add(self, ticket: Ticket) -> None:
        self._tickets[id(ticket)] = ticket
        self._count(ticket.is_awaited)

    def _remove(self, ticket: Ticket) -> None:
        del self._tickets[id(ticket)]
        self._count(-ticket.is_awaited)

    def _count(self, difference: int) -> None:
        self._num_awaited += difference
        if self._num_awaited:
            self._empty.clear()
        else:
            self._empty.set()

    def interrupt_all(self, cause: Exception) -> None:
        for ticket in list(self._tickets.values()):
            ticket.interrupt(cause)

    def interrupt(self, request_id: str, cause: Exception, kind: str) -> int:
        """Ends all requests of this id, but not the one that asks for it; says how many there were."""
        asking = asyncio.current_task()
        found = [one for one in self._tickets.values() if one.request_id == request_id and one.task is not asking]
        for ticket in found:
            ticket.interrupt(cause, kind)
        return len(found)

    async def wait_empty(self) -> None:
        # a stream leaves, and enters again for its end, before anybody is woken
        while self._num_awaited:
            await self._empty.wait()


async def until_disconnect(in_flight: InFlight, receive: Receive, answer: Awaitable[_T]) -> _T:
    """Awaits `answer`; raises ClientGoneError as soon as the client closes its connection."""

    async def watch(ticket: Ticket) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.interrupt(ClientGoneError())

    with in_flight.enter() as ticket:
        watcher = asyncio.ensure_future(watch(ticket))
        try:
            return await answer
        finally:
            watcher.cancel()


def ended_by_administrator() -> ApiError:
    return ApiError(
        503,
        "The request was ended by the administrator of this server.",
        type="server_error",
        code="request_aborted",
        headers={"x-should-retry": "false"},
    )

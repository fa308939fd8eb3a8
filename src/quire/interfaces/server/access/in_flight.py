"""Requests that are being answered: how few begin at once, how one is ended from outside, and the clocks that do so.

A request is ended for a cause: its client went away, the server stops, the engine died. The cause is raised inside the
request's own task, so that every `finally` on the way runs and the engine is told to abort.

Few requests begin in one turn of the event loop, however many arrive at once. To read, check and tokenise one takes
some milliseconds. Of hundreds that come together each would do so before the loop looks at its sockets again, and
/health and all streams would stand still meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from quire.errors import EngineDeadError
from quire.interfaces.server.access.caller import Admission, Reservation, current_caller
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError, idle

Receive = Callable[[], Awaitable[Any]]
# Requests that begin in a turn of the event loop.
MOST_A_TURN = 4
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

    def interrupt_all(self, cause: Exception, kind: str = "shutdown") -> None:
        """But not the one that asks for it."""
        asking = asyncio.current_task()
        for ticket in list(self._tickets.values()):
            if ticket.task is not asking:
                ticket.interrupt(cause, kind)

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


@contextmanager
def within_time(admission: Admission, reservation: Reservation, *, is_arriving: bool = False) -> Iterator[None]:
    """Ends the running request if it has not begun in time, or is not over in time.

    `is_arriving`: its prompt is on the way, so only the time of the whole counts.
    """
    ticket = current_ticket()
    if ticket is None or current_caller().is_patient:
        # of work in the background, which has a time of its own
        yield
        return
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(admission.request_seconds, _end_running, admission.request_seconds, ticket)]
    if not is_arriving:
        timers.append(loop.call_later(admission.queue_seconds, _end_waiting, admission, reservation, ticket))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


@contextmanager
def arriving_within(seconds: float, ticket: Ticket) -> Iterator[None]:
    """Ends a request whose body comes piece by piece, each in time, and never ends."""
    too_long = idle(f"The body did not come whole within {seconds:g} seconds (max_request_seconds).")
    timer = asyncio.get_running_loop().call_later(seconds, ticket.interrupt, too_long, "request_time")
    try:
        yield
    finally:
        timer.cancel()


def _end_waiting(admission: Admission, reservation: Reservation, ticket: Ticket) -> None:
    if not reservation.has_begun:
        ticket.interrupt(admission.waited_too_long(), "queue_time")


def _end_running(seconds: float, ticket: Ticket) -> None:
    # official clients send what ended with 5xx once more by themselves, unless they are told not to
    too_long = ApiError(
        504,
        f"The request ran for {seconds:g} s and was ended: that is the longest here (max_request_seconds). Ask for "
        "fewer tokens or fewer answers at once, or raise the limit.",
        type="server_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )
    ticket.interrupt(too_long, "request_time")

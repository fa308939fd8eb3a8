"""How long a request may wait, and how long it may take: clocks that end it from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from quire.interfaces.server.access.caller import Admission, Reservation, current_caller
from quire.interfaces.server.access.in_flight import Ticket, current_ticket
from quire.interfaces.server.wire.errors import ApiError, idle


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
    too_long = _took_too_long(admission.request_seconds)
    timers = [loop.call_later(admission.request_seconds, ticket.interrupt, too_long, "request_time")]
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


def _took_too_long(seconds: float) -> ApiError:
    # official clients send what ended with 5xx once more by themselves, unless they are told not to
    return ApiError(
        504,
        f"The request ran for {seconds:g} s and was ended: that is the longest here (max_request_seconds). Ask for "
        "fewer tokens or fewer answers at once, or raise the limit.",
        type="server_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )

"""Requests in flight, and what is left of one that was interrupted."""

import asyncio
import gc
import weakref

import pytest

from quire.interfaces.server.access.in_flight import InFlight, Ticket, until_disconnect
from quire.interfaces.server.wire.errors import ClientGoneError


@pytest.fixture
def no_collector():
    """What is freed without it is freed at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_interrupted_request_is_freed_at_once(run, no_collector):
    """Its error knows the frames that it went through, so nothing in these may know the error."""
    tickets: list[weakref.ref[Ticket]] = []

    async def answers(in_flight: InFlight) -> None:
        try:
            with in_flight.enter() as ticket:
                tickets.append(weakref.ref(ticket))
                await asyncio.Event().wait()
        except ClientGoneError:
            return

    async def main() -> None:
        in_flight = InFlight()
        task = asyncio.create_task(answers(in_flight))
        await asyncio.sleep(0)
        in_flight.interrupt_all(ClientGoneError())
        await task
        assert tickets[0]() is None

    run(main())


def test_the_first_cause_counts(run):
    async def main() -> None:
        heard: list[str] = []
        in_flight = InFlight(heard.append)

        async def is_slow() -> None:
            with in_flight.enter() as ticket:
                ticket.interrupt(ClientGoneError("slow_client"))
                ticket.interrupt(RuntimeError("later"))
                await asyncio.sleep(0)

        with pytest.raises(ClientGoneError) as caught:
            await is_slow()
        assert (caught.value.kind, heard) == ("slow_client", ["slow_client"])
        assert not len(in_flight)

    run(main())


def test_a_client_that_leaves_ends_its_request(run):
    async def main() -> None:
        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGoneError):
            await until_disconnect(InFlight(), receive, asyncio.Event().wait())

    run(main())

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


def test_a_task_is_interrupted_once(run):
    """Its inner ticket counts, and the outer one is as before when it is back."""

    async def is_ended_inside(in_flight: InFlight) -> None:
        with in_flight.enter():
            assert len(in_flight) == 1
            # whoever asks for it goes on, so it is nobody's task
            asyncio.get_running_loop().call_soon(in_flight.interrupt_all, ClientGoneError("slow_client"))
            await asyncio.sleep(0)

    async def is_ended_before(in_flight: InFlight) -> None:
        with in_flight.enter() as outer:
            outer.interrupt(ClientGoneError())
            with in_flight.enter():
                await asyncio.sleep(0)

    async def main() -> None:
        heard: list[str] = []
        in_flight = InFlight(heard.append)
        with in_flight.enter(is_awaited=False) as outer:
            with pytest.raises(ClientGoneError):
                await is_ended_inside(in_flight)
            await asyncio.sleep(0)
            assert (len(in_flight), outer.kind, heard) == (1, "", ["slow_client"])
        with pytest.raises(ClientGoneError):
            await is_ended_before(in_flight)
        assert heard == ["slow_client", "client_gone"]
        assert not len(in_flight)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    run(main())


def test_a_request_is_not_waited_for_in_between(run):
    async def main() -> None:
        in_flight = InFlight()
        with in_flight.enter():
            with in_flight.enter(is_awaited=False):
                await in_flight.wait_empty()
                # a task that it has started has a ticket of its own
                started = asyncio.create_task(in_flight_for_a_turn(in_flight))
                await asyncio.sleep(0)
                assert len(in_flight) == 2
                await started
            empty = asyncio.create_task(in_flight.wait_empty())
            await asyncio.sleep(0)
            assert (len(in_flight), empty.done()) == (1, False)
        await empty
        assert not len(in_flight)

    async def in_flight_for_a_turn(in_flight: InFlight) -> None:
        with in_flight.enter():
            await asyncio.sleep(0)

    run(main())


def test_a_client_that_leaves_ends_its_request(run):
    async def main() -> None:
        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGoneError):
            await until_disconnect(InFlight(), receive, asyncio.Event().wait())

    run(main())

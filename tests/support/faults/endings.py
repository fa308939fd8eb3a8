"""The end of a server, as it is asked for."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.support.faults.case import Case, Figures
from tests.support.faults.history import FAILED
from tests.support.faults.stage import FaultedServer, Setting, fault_on, private_folder, under_streams, until_gone


async def end_of_an_idle_server(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder) as server:
        await asyncio.to_thread(server.wait_ready)
        return await _ended(server, signal.SIGTERM)


async def end_with_running_streams(setting: Setting) -> Figures:
    """All of them finish; who comes later is sent away; then it ends at once."""
    async with under_streams(setting) as (server, streams):
        with fault_on(streams):
            server.signal()
            began = time.monotonic()
            while await streams.is_ready():
                pass
            not_ready = time.monotonic() - began
            refused = await streams.get("/v1/models")
            assert refused.status_code == 503
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
            streams.finish()
            await streams.wait_finished()
            after = await _ended(server)
        assert not streams.history.counts()[FAILED]
        return {"not ready": not_ready, **after}


async def end_at_the_deadline(setting: Setting) -> Figures:
    async with under_streams(setting, "--shutdown-timeout", "0.2") as (server, streams):
        with fault_on(streams):
            streams.finish()
            after = await _ended(server, signal.SIGTERM)
        return {"exit after the deadline": after["exit"] - 0.2}


async def end_with_a_second_signal(setting: Setting) -> Figures:
    async with under_streams(setting) as (server, streams):
        with fault_on(streams):
            streams.finish()
            server.signal()
            while await streams.is_ready():
                pass
            return await _ended(server, signal.SIGINT)


async def end_while_it_loads(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder, core="build_slowly") as server:
        await asyncio.to_thread(server.wait_for, "building slowly")
        return await _ended(server, signal.SIGTERM)


async def _ended(server: FaultedServer, number: signal.Signals | None = None) -> Figures:
    """With status 0, and nothing is left."""
    processes, began = ([] if server.has_ended else server.descendants()), time.monotonic()
    if number is not None:
        server.signal(number)
    status = await asyncio.to_thread(server.wait)
    took = time.monotonic() - began
    assert status == 0, f"exit status {status}: {server.output[-500:]}"
    assert "Traceback" not in server.output
    await until_gone(processes, 1.0)
    assert not server.left_behind(), server.left_behind()
    return {"exit": took}


CASES = (
    Case("D1", "SIGTERM of an idle server", end_of_an_idle_server, {"exit": 3.0}, times=5),
    Case("D2", "SIGTERM while streams run", end_with_running_streams, {"not ready": 0.1, "exit": 3.0}, times=5),
    Case("D3", "the deadline of the end passes", end_at_the_deadline, {"exit after the deadline": 2.0}, times=5),
    Case("D4", "a second signal", end_with_a_second_signal, {"exit": 2.0}, times=5),
    Case("D5", "SIGTERM while it loads", end_while_it_loads, {"exit": 5.0}, times=5),
)

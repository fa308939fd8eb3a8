"""The engine dies, stands still, or loses its server (F1 to F5).

The worker lives in the engine's process, so its crash (F1) and the engine's death (F2) differ only in the signal.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from dataclasses import replace
from urllib.parse import urlsplit

import psutil
from tests.support.faults.case import Case, Core, Figures
from tests.support.faults.stage import (
    OFTEN,
    FaultedServer,
    Setting,
    check,
    fault_on,
    loses_its_engine,
    private_folder,
    under_streams,
    until,
    until_gone,
    until_ready,
)
from tests.support.faults.streams import LiveStreams


async def crash_of_the_worker(setting: Setting) -> Figures:
    async with under_streams(setting, *OFTEN) as (server, streams):
        figures = await loses_its_engine(server, streams, signal.SIGSEGV)
        [report] = list(server.reports.iterdir())
        assert "Segmentation fault" in report.read_text(encoding="utf-8")
        return figures


async def death_of_the_engine(setting: Setting) -> Figures:
    async with under_streams(setting, *OFTEN) as (server, streams):
        figures = await loses_its_engine(server, streams, signal.SIGKILL)
        assert await streams.metric("quire:engine_restarts_total") == 1
        [report] = [json.loads(file.read_text(encoding="utf-8")) for file in server.reports.iterdir()]
        assert report["last_steps"][-1]["num_rows"] > 0, "the report does not say what was decided last"
        return figures


async def stopped_engine(setting: Setting) -> Figures:
    async with under_streams(setting, *OFTEN) as (server, streams):
        figures = await loses_its_engine(server, streams, signal.SIGSTOP)
        [report] = [json.loads(file.read_text(encoding="utf-8")) for file in server.reports.iterdir()]
        assert report["kind"] == "stall"
        assert any("process.py" in line for line in report["stacks"])
        return {"detected after T": figures["noticed"] - setting.stall_timeout, "ready again": figures["ready again"]}


async def hang_in_native_code(setting: Setting) -> Figures:
    """It holds the interpreter, so no Python of the engine runs any more."""
    with private_folder() as folder:
        hang = folder / "hang"
        async with under_streams(replace(setting, is_paced=True), *OFTEN, PACED_HANG=str(hang)) as (server, streams):
            with fault_on(streams):
                hang.touch()
                began = time.monotonic()
                await until_ready(streams, False)
                noticed = time.monotonic() - began
                await until_ready(streams, True)
            [report] = list(server.reports.iterdir())
            assert "in step" in report.read_text(encoding="utf-8")
            return {"detected after T": noticed - setting.stall_timeout}


async def death_of_the_server(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder) as server:
        url = await asyncio.to_thread(server.wait_ready)
        async with LiveStreams(url, setting.num_streams, setting.history(may_break=True)) as streams:
            await streams.wait_live((setting.num_streams + 1) // 2)
            figures = await _killed(server)
            streams.finish()
        check(streams.history)
        _check_port_is_free(url)
        return figures


async def death_of_the_server_while_it_loads(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder, core="build_slowly") as server:
        await asyncio.to_thread(server.wait_for, "building slowly")
        return await _killed(server)


async def death_of_the_server_in_native_code(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder, core="build_in_kernel") as server:
        await asyncio.to_thread(server.wait_for, "building in a kernel")
        return await _killed(server)


async def death_of_the_server_while_it_compiles(setting: Setting) -> Figures:
    """A first start on a machine: the compilers, and what they have started, work for the engine."""
    with private_folder() as folder:
        cache = {"QUIRE_CACHE_DIR": str(folder / "cache")}
        with FaultedServer(replace(setting, is_paced=False), folder, **cache) as server:
            await asyncio.to_thread(server.wait_for, "compiled for this machine now")
            await until(lambda: any("cc1plus" in name for name in server.names_of_descendants()))
            return await _killed(server)


async def _killed(server: FaultedServer) -> Figures:
    processes = server.descendants()
    assert processes
    server.signal(signal.SIGKILL)
    gone = await until_gone(processes)
    await until(lambda: not server.left_behind(), 2.0)
    return {"all gone": gone}


async def too_many_crashes(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder) as server:
        url = await asyncio.to_thread(server.wait_ready)
        async with LiveStreams(url, 0, setting.history(may_break=True)) as streams:
            for number in range(4):
                psutil.Process(server.engine_pid()).kill()
                if number < 3:
                    await until_ready(streams, False)
                    await until_ready(streams, True)
        began = time.monotonic()
        status = await asyncio.to_thread(server.wait)
        took = time.monotonic() - began
        last = server.output.strip().splitlines()[-1]
        assert status == 70, f"exit status {status}"
        assert "the engine died" in last, last
        assert "SIGKILL" in last, last
        return {"exit": took}


def _check_port_is_free(url: str) -> None:
    address = urlsplit(url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.hostname, address.port))


LOSSES = {"noticed": 2.0, "ready again": 15.0}
CASES = (
    Case("F1", "the worker crashes (SIGSEGV)", crash_of_the_worker, LOSSES, core=Core.EITHER),
    Case("F2", "kill -9 of the engine", death_of_the_engine, LOSSES, core=Core.EITHER),
    Case("F3", "SIGSTOP of the engine", stopped_engine, {"detected after T": 2.0}),
    Case("F3b", "the engine hangs in native code", hang_in_native_code, {"detected after T": 2.0}, times=5),
    Case("F4", "kill -9 of the server", death_of_the_server, {"all gone": 2.0}),
    Case("F4b", "the same while it loads", death_of_the_server_while_it_loads, {"all gone": 2.0}),
    Case("F4c", "the same, loading in native code", death_of_the_server_in_native_code, {"all gone": 2.0}),
    Case("F4d", "the same, compiling", death_of_the_server_while_it_compiles, {"all gone": 2.0}, 5, Core.EMBEDDED),
    Case("F5", "four crashes within a minute", too_many_crashes, {"exit": 3.0}),
)

"""The faults, one function each: it starts what it needs, breaks something, and returns what it has measured.

A figure may not exceed its goal, and a case may not raise; that is all the judgement there is. The worker lives in the
engine's process, so its crash (F1) and the engine's death (F2) differ only in the signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import psutil

from quire.testing.faults import disconnects
from quire.testing.faults.history import FAILED, FINISHED, History
from quire.testing.faults.stage import (
    FaultedServer,
    Setting,
    fault_on,
    loses_its_engine,
    private_folder,
    under_streams,
    until,
    until_gone,
    until_ready,
)
from quire.testing.faults.streams import PROMPTS, LiveStreams

Figures = dict[str, float]
Run = Callable[[Setting], Awaitable[Figures]]
# so that repetitions do not use up the restarts of a minute
_OFTEN = ("--engine-restart-window", "0.1")


@dataclass(frozen=True)
class Case:
    """`goals`: most that a figure may be, in seconds unless its name says otherwise."""

    id: str
    what: str
    run: Run
    goals: dict[str, float] = field(default_factory=dict)


async def crash_of_the_worker(setting: Setting) -> Figures:
    async with under_streams(setting, *_OFTEN) as (server, streams):
        figures = await loses_its_engine(server, streams, signal.SIGSEGV)
        [report] = list(server.reports.iterdir())
        assert "Segmentation fault" in report.read_text(encoding="utf-8")
        return figures


async def death_of_the_engine(setting: Setting) -> Figures:
    async with under_streams(setting, *_OFTEN) as (server, streams):
        figures = await loses_its_engine(server, streams, signal.SIGKILL)
        assert await streams.metric("quire:engine_restarts_total") == 1
        return figures


async def stopped_engine(setting: Setting) -> Figures:
    async with under_streams(setting, *_OFTEN) as (server, streams):
        figures = await loses_its_engine(server, streams, signal.SIGSTOP)
        [report] = [json.loads(file.read_text(encoding="utf-8")) for file in server.reports.iterdir()]
        assert report["kind"] == "stall"
        assert any("process.py" in line for line in report["stacks"])
        return {"detected after T": figures["noticed"] - setting.stall_timeout, "ready_again": figures["ready_again"]}


async def hang_in_native_code(setting: Setting) -> Figures:
    """It holds the interpreter, so no Python of the engine runs any more."""
    with private_folder() as folder:
        hang = folder / "hang"
        async with under_streams(replace(setting, is_paced=True), *_OFTEN, PACED_HANG=str(hang)) as (server, streams):
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
        async with LiveStreams(url, setting.num_streams, _broken_history()) as streams:
            await streams.wait_live((setting.num_streams + 1) // 2)
            figures = await _killed(server)
            streams.finish()
        assert not streams.history.mistakes()
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
        async with LiveStreams(url, 0, _broken_history()) as streams:
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


async def clients_that_leave(setting: Setting) -> Figures:
    """Eight ways, one after the other; the figure is the longest time until the engine runs nothing."""
    longest = 0.0
    async with under_streams(replace(setting, num_streams=0)) as (_, streams):
        for number, leave in enumerate(disconnects.KINDS.values(), 1):
            await asyncio.to_thread(leave, streams.url)
            longest = max(longest, await _until_nothing_runs(streams))
            assert await streams.metric("quire:requests_aborted_total") == number
        assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
    return {"blocks back": longest}


async def storm_of_aborts(setting: Setting) -> Figures:
    async with under_streams(replace(setting, num_streams=0)) as (_, streams):
        await asyncio.to_thread(disconnects.storm, streams.url, setting.num_aborts, setting.num_aborts)
        took = await _until_nothing_runs(streams)
        assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
        return {"nothing runs": took}


async def _until_nothing_runs(streams: LiveStreams) -> float:
    began = time.monotonic()
    names = ("quire:num_requests_running", "quire:num_requests_waiting", "quire:num_requests_open")
    while any([await streams.metric(name) for name in names]):
        assert time.monotonic() - began < 60
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def no_place_for_reports(setting: Setting) -> Figures:
    """The folder of the crash reports is a file: the engine is started again all the same."""
    async with under_streams(setting, *_OFTEN, "--crash-reports", "/dev/null/reports") as (server, streams):
        return await loses_its_engine(server, streams, signal.SIGKILL)


async def few_descriptors(setting: Setting) -> Figures:
    """128 for the server, and more connections than that. It serves again when they are gone."""
    async with under_streams(replace(setting, num_streams=2)) as (server, streams):
        psutil.Process(server.pid).rlimit(psutil.RLIMIT_NOFILE, (128, 128))
        with contextlib.ExitStack() as idle, fault_on(streams):
            streams.history.may_break = True
            for _ in range(160):
                idle.enter_context(disconnects.connect(streams.url))
            await asyncio.sleep(0.3)
        began = time.monotonic()
        while (await streams.ask(PROMPTS[0])).end != FINISHED:
            assert time.monotonic() - began < 30
        return {"serves again": time.monotonic() - began}


async def checker_of_forms_dies(setting: Setting) -> Figures:
    """The one helper that the front end has. The next form is checked by a new one."""
    async with under_streams(setting) as (server, streams):
        assert await _with_form(streams, "first") == 200
        engine = server.engine_pid()
        for process in server.descendants():
            if process.pid != engine:
                process.kill()
        began = time.monotonic()
        assert await _with_form(streams, "second") == 200
        return {"checked again": time.monotonic() - began}


async def _with_form(streams: LiveStreams, name: str) -> int:
    schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "response_format": form}
    return await streams.post_status("/v1/completions", body)


async def nobody_reads_the_log(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder) as server:
        server.reads_until = "Quire serves"
        url = await asyncio.to_thread(server.wait_ready)
        async with LiveStreams(url, min(setting.num_streams, 4), _broken_history()) as streams:
            # each writes a line; a pipe holds some six hundred of them
            for _ in range(1500):
                assert (await streams.get("/v1/models")).status_code == 200
            began = time.monotonic()
            assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
            answered = time.monotonic() - began
            streams.finish()
        assert not streams.history.mistakes()
        server.signal()
        began = time.monotonic()
        assert await until(lambda: server.has_ended) >= 0
        return {"answer": answered, "exit": time.monotonic() - began}


# ---------------------------------------------------------------------------------------------- the end of a server


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
    assert not server.left_behind()
    return {"exit": took}


def _broken_history() -> History:
    """Of clients whose server is ended."""
    return History(may_break=True)


def _check_port_is_free(url: str) -> None:
    address = urlsplit(url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.hostname, address.port))


LOSSES = {"noticed": 2.0, "ready_again": 15.0}
CASES = (
    Case("F1", "the worker crashes (SIGSEGV)", crash_of_the_worker, LOSSES),
    Case("F2", "kill -9 of the engine", death_of_the_engine, LOSSES),
    Case("F3", "SIGSTOP of the engine", stopped_engine, {"detected after T": 2.0}),
    Case("F3b", "the engine hangs in native code", hang_in_native_code, {"detected after T": 2.0}),
    Case("F4", "kill -9 of the server", death_of_the_server, {"all gone": 2.0}),
    Case("F4b", "the same while it loads", death_of_the_server_while_it_loads, {"all gone": 2.0}),
    Case("F4c", "the same, loading in native code", death_of_the_server_in_native_code, {"all gone": 2.0}),
    Case("F5", "four crashes within a minute", too_many_crashes, {"exit": 3.0}),
    Case("F10", "clients that leave, eight ways", clients_that_leave, {"blocks back": 1.0}),
    Case("F11", "a storm of aborts", storm_of_aborts, {"nothing runs": 2.0}),
    Case("F15a", "no place for crash reports", no_place_for_reports, LOSSES),
    Case("F15b", "128 descriptors, 160 connections", few_descriptors, {"serves again": 5.0}),
    Case("F17", "the checker of forms dies", checker_of_forms_dies, {"checked again": 15.0}),
    Case("F19", "nobody reads the log", nobody_reads_the_log, {"answer": 2.0, "exit": 4.0}),
    Case("D1", "SIGTERM of an idle server", end_of_an_idle_server, {"exit": 3.0}),
    Case("D2", "SIGTERM while streams run", end_with_running_streams, {"not ready": 0.1, "exit": 3.0}),
    Case("D3", "the deadline of the end passes", end_at_the_deadline, {"exit after the deadline": 2.0}),
    Case("D4", "a second signal", end_with_a_second_signal, {"exit": 2.0}),
    Case("D5", "SIGTERM while it loads", end_while_it_loads, {"exit": 5.0}),
)

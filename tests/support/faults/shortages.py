"""Something that a server stands on is short or gone: descriptors, disk, the log, a helper (F15, F17, F19)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import replace

import psutil
from tests.support.faults import disconnects
from tests.support.faults.case import Case, Figures
from tests.support.faults.deaths import LOSSES
from tests.support.faults.history import FINISHED
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
)
from tests.support.faults.streams import PROMPTS, LiveStreams


async def no_place_for_reports(setting: Setting) -> Figures:
    """The folder of the crash reports is a file: the engine is started again all the same."""
    async with under_streams(setting, *OFTEN, "--crash-reports", "/dev/null/reports") as (server, streams):
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


async def few_descriptors_from_the_start(setting: Setting) -> Figures:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    async with under_streams(setting, prelude=limit) as (_, streams):
        return await _answers(streams)


async def log_without_a_disk(setting: Setting) -> Figures:
    """Every line of the log fails, for want of room."""
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
    async with under_streams(setting, prelude=full) as (_, streams):
        return await _answers(streams)


async def no_folder_for_temporary_files(setting: Setting) -> Figures:
    """The one that it is told of cannot be written; the system has others."""
    async with under_streams(setting, TMPDIR="/proc/1/fd/nowhere") as (_, streams):
        return await _answers(streams)


async def files_that_cannot_grow(setting: Setting) -> Figures:
    """As on a full disk: what is uploaded finds no room, what needs none is answered. Then there is room again."""
    with private_folder() as folder:
        async with under_streams(setting, "--storage-url", f"sqlite:///{folder}/data/quire.db") as (server, streams):
            assert (await _upload(streams))[0] == 200
            process = psutil.Process(server.pid)
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
            status, text = await _upload(streams)
            assert status in (503, 507), text
            figures = await _answers(streams)
            process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
            began = time.monotonic()
            while (await _upload(streams))[0] != 200:
                assert time.monotonic() - began < 30
            return {**figures, "stores again": time.monotonic() - began}


async def _answers(streams: LiveStreams) -> Figures:
    began = time.monotonic()
    assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
    return {"answer": time.monotonic() - began}


async def _upload(streams: LiveStreams) -> tuple[int, str]:
    return await streams.upload("/v1/files", {"purpose": "batch"}, b"{}\n" * 1000)


async def checker_of_forms_dies(setting: Setting) -> Figures:
    """The one helper that the front end has, again and again. The next form is checked by a new one."""
    slowest = 0.0
    async with under_streams(setting) as (server, streams):
        engine = server.engine_pid()
        assert await _with_form(streams, "first") == 200
        for number in range(setting.num_rounds):
            [helper] = [process for process in server.descendants() if process.pid != engine]
            helper.kill()
            # a form that is handed to it before it is gone may be refused with it
            await until_gone([helper])
            began = time.monotonic()
            assert await _with_form(streams, f"form {number}") == 200
            slowest = max(slowest, time.monotonic() - began)
        assert server.engine_pid() == engine
    return {"checked again": slowest, "killed, times": setting.num_rounds}


async def _with_form(streams: LiveStreams, name: str) -> int:
    schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "response_format": form}
    return (await streams.post("/v1/completions", body))[0]


async def nobody_reads_the_log(setting: Setting) -> Figures:
    with private_folder() as folder, FaultedServer(setting, folder) as server:
        server.reads_until = "Quire serves"
        url = await asyncio.to_thread(server.wait_ready)
        async with LiveStreams(url, min(setting.num_streams, 4), setting.history(may_break=True)) as streams:
            # each writes a line; a pipe holds some six hundred of them
            for _ in range(1500):
                assert (await streams.get("/v1/models")).status_code == 200
            began = time.monotonic()
            assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
            answered = time.monotonic() - began
            streams.finish()
        check(streams.history)
        server.signal()
        began = time.monotonic()
        assert await until(lambda: server.has_ended) >= 0
        return {"answer": answered, "exit": time.monotonic() - began}


_ANSWERS = {"answer": 5.0}
CASES = (
    Case("F15a", "no place for crash reports", no_place_for_reports, LOSSES, times=1),
    Case("F15b", "128 descriptors, 160 connections", few_descriptors, {"serves again": 5.0}, times=1),
    Case("F15c", "128 descriptors from the start", few_descriptors_from_the_start, _ANSWERS, times=1),
    Case("F15d", "no room for the log", log_without_a_disk, _ANSWERS, times=1),
    Case("F15e", "no folder for temporary files", no_folder_for_temporary_files, _ANSWERS, times=1),
    Case("F15f", "files cannot grow", files_that_cannot_grow, {**_ANSWERS, "stores again": 5.0}, times=1),
    Case("F17", "the checker of forms dies", checker_of_forms_dies, {"checked again": 15.0}, times=1),
    Case("F19", "nobody reads the log", nobody_reads_the_log, {"answer": 2.0, "exit": 4.0}, times=1),
)

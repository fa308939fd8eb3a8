"""One request of many goes wrong (F6 to F9): it alone is told so, and the engine that all others use is the same."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from tests.support.completion_clients import CompletionClients
from tests.support.faults.case import Case, Core, Figures, Run
from tests.support.faults.history import FAILED
from tests.support.faults.stage import FaultedServer, Setting, fault_on, private_folder, under_streams, until
from tests.support.faults.streams import LiveStreams

# a token that none of the streams has in its prompt or its answer
_POISON = 301
_NEVER_SAID = {str(_POISON): -100.0}


@contextlib.asynccontextmanager
async def _same_engine(
    setting: Setting, *options: str, **more: str
) -> AsyncIterator[tuple[FaultedServer, LiveStreams]]:
    """At the end the engine's process is the one of the beginning, and when nothing runs any more, nothing is held."""
    async with under_streams(setting, *options, **more) as (server, streams):
        engine = server.engine_pid()
        yield server, streams
        streams.finish()
        await streams.wait_finished()
        assert server.engine_pid() == engine
        restarts, running, held = await streams.metrics(
            "quire:engine_restarts_total", "quire:num_requests_running", "quire:kv_cache_blocks_held"
        )
        assert (restarts, running, held) == (0, 0, 0)


def poisoned(entry: str) -> Run:
    """So many requests, one after the other, of which each has the token in its prompt that `entry` sees."""

    async def run(setting: Setting) -> Figures:
        slowest = 0.0
        async with _same_engine(setting, QUIRE_FAIL=f"{entry}:when={_POISON}") as (_, streams):
            clients = CompletionClients(streams.url, logit_bias=_NEVER_SAID)
            for number in range(setting.num_rounds):
                began = time.monotonic()
                answer = await asyncio.to_thread(clients.ask, number, _POISON)
                slowest = max(slowest, time.monotonic() - began)
                is_told = answer.error is not None and (answer.status == 500 or number % 2 == 0)
                assert is_told, f"the poisoned request was told {answer}"
            assert await streams.metric("quire:failed_requests_total") == setting.num_rounds
        return {"it is told": slowest, "failed alone, requests": setting.num_rounds}

    return run


async def nth_operation_without_memory(setting: Setting) -> Figures:
    """The file that names n is gone when the n-th operation has failed."""
    with private_folder() as folder:
        file, written = folder / "n", folder / "written"
        # operations of a recorded program are not seen one by one; what it says is not compared with what is said here
        options = ("--enforce-eager", "--no-async-scheduling")
        setting = replace(setting, right_answers={True: {}, False: {}})
        async with _same_engine(setting, *options, core="build_short_of_memory", SHORT_OF_MEMORY=str(file)) as (
            _,
            streams,
        ):
            streams.history.codes = ("internal_error",)
            for n in range(1, setting.num_operations + 1):
                with fault_on(streams):
                    # there with its number, or not at all: the engine looks before each step
                    written.write_text(str(n), encoding="utf-8")
                    written.rename(file)
                    await until(lambda: not file.exists(), 30.0)
                assert streams.history.counts()[FAILED] <= n, "one injection failed more than one request"
            short, failed = await streams.metrics("quire:out_of_memory_steps_total", "quire:failed_requests_total")
            assert short == setting.num_operations, f"{short} steps were short of memory"
        return {"injections, times": setting.num_operations, "failed, requests": failed}


def form_that_breaks_its_compiler(action: str, *words: str) -> Run:
    """A compiler checks itself, then takes a good form; the next one breaks it. The good ones are asked for again by
    each new compiler, or, where the old one lives on, answered from what is known of them."""
    lives_on = action == "raise"
    entry = f"in_grammar_compile:{action}:after=2" + ("" if lives_on else ":count=1")

    async def run(setting: Setting) -> Figures:
        slowest = 0.0
        async with _same_engine(setting, QUIRE_FAIL=entry) as (_, streams):
            for number in range(setting.num_rounds):
                assert (await _ask_form(streams, "good" if lives_on else f"good {number}"))[0] == 200
                began = time.monotonic()
                status, text = await _ask_form(streams, f"bad {number}")
                slowest = max(slowest, time.monotonic() - began)
                assert status == 400, text
                assert all(word in text for word in words), text
        return {"it is told": slowest, "refused alone, requests": setting.num_rounds}

    return run


async def _ask_form(streams: LiveStreams, name: str) -> tuple[int, str]:
    return await streams.post("/v1/completions", {"prompt": name, "max_tokens": 4, "guided_choice": [name, "other"]})


CASES = (
    Case("F6", "one request raises in the forward pass", poisoned("in_forward:raise"), times=1, core=Core.EMBEDDED),
    Case("F6b", "one request raises in the sampler", poisoned("before_sample:raise"), times=1, core=Core.EMBEDDED),
    Case("F7", "a row of NaN", poisoned("nan_row:corrupt"), times=1, core=Core.EMBEDDED),
    Case("F8", "the n-th operation finds no memory", nth_operation_without_memory, times=1, core=Core.EMBEDDED),
    Case("F9", "a form raises in its compiler", form_that_breaks_its_compiler("raise"), times=1),
    Case("F9b", "a form ends its compiler", form_that_breaks_its_compiler("exit", "MiB"), times=1),
    Case("F9c", "a form has its compiler killed", form_that_breaks_its_compiler("kill9", "MiB"), times=1),
    Case("F9d", "a form is compiled for ever", form_that_breaks_its_compiler("hang", "5 s"), times=1),
)

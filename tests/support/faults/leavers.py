"""Clients that go away (F10, F11): what they asked for is given up, and nothing of it stays."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from tests.support.faults import disconnects
from tests.support.faults.case import Case, Figures
from tests.support.faults.stage import Setting, under_streams
from tests.support.faults.streams import PROMPTS, LiveStreams

_SLOW_FORMS = {"QUIRE_FAIL": "in_grammar_compile:slow:seconds=0.15"}
_GOALS = {"nothing is held": 1.0, "nothing is held, p99": 0.25}
_WHAT_RUNS = (
    "quire:num_requests_running",
    "quire:num_requests_waiting",
    "quire:num_requests_open",
    "quire:kv_cache_blocks_held",
)


async def clients_that_leave(setting: Setting) -> Figures:
    """In each way, one after the other; the figures are how long it takes until the engine runs and holds nothing."""
    quiet, took, num_left = replace(setting, num_streams=0), [], 0
    few_rows = ("--max-num-seqs", str(disconnects.MAX_NUM_SEQS))
    async with under_streams(quiet, *few_rows, **_SLOW_FORMS) as (_, streams):
        # its first form starts the compiler
        await streams.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "guided_choice": ["a", "b"]})
        for _ in range(setting.num_leaves):
            for name, leave in disconnects.KINDS.items():
                num_left += await asyncio.to_thread(leave, streams.url)
                took.append(await _until_nothing_runs(streams, num_left))
                assert await streams.metric("quire:requests_aborted_total") == num_left, name
        await _is_right(streams)
    took.sort()
    return {"nothing is held": took[-1], "nothing is held, p99": took[len(took) * 99 // 100], "left, times": len(took)}


async def storm_of_aborts(setting: Setting) -> Figures:
    async with under_streams(replace(setting, num_streams=0)) as (_, streams):
        began = time.monotonic()
        await asyncio.to_thread(disconnects.storm, streams.url, setting.num_aborts, setting.num_aborts)
        lasted, took = time.monotonic() - began, await _until_nothing_runs(streams, 0)
        await _is_right(streams)
        return {"nothing is held": took, "the storm": lasted}


async def _is_right(streams: LiveStreams) -> None:
    assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]


async def _until_nothing_runs(streams: LiveStreams, num_aborted: int) -> float:
    """How long it takes until so many requests in all were aborted, and nothing is left of them."""
    began = time.monotonic()
    while True:
        aborted, *left = await streams.metrics("quire:requests_aborted_total", *_WHAT_RUNS)
        if aborted >= num_aborted and not any(left):
            return time.monotonic() - began
        assert time.monotonic() - began < 60, f"{aborted:.0f} of {num_aborted} were aborted, and {left} are left"
        await asyncio.sleep(0.005)


CASES = (
    Case("F10", "clients that leave, ten ways", clients_that_leave, _GOALS, times=1),
    Case("F11", "a storm of aborts", storm_of_aborts, {"nothing is held": 2.0}, times=1),
)

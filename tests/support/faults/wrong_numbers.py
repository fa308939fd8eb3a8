"""What comes is not what was expected: garbage on the socket inside, results that nobody waits for, a clock that jumps
(F14, F16, F21)."""

from __future__ import annotations

import asyncio
import json
import time

from tests.support.faults.case import Case, Figures
from tests.support.faults.history import FINISHED
from tests.support.faults.noise import VARIABLE
from tests.support.faults.stage import Setting, private_folder, under_streams
from tests.support.faults.streams import PROMPTS, LiveStreams

_HOUR = 3600
# at each time of the clock
_STREAMS_PER_HOUR = 8


async def garbage_on_the_socket_inside(setting: Setting) -> Figures:
    """Both ends send so many frames of it, among the messages of the streams."""
    noise = {VARIABLE: str(setting.num_frames)}
    async with under_streams(setting, core="build_noisy", **noise) as (server, streams):
        for end in ("core", "server"):
            await asyncio.to_thread(server.wait_for, f"{setting.num_frames} frames of noise went to the {end}", 60.0)
        await _still_the_same(streams)
    return {"frames each way, frames": setting.num_frames}


async def results_that_nobody_waits_for(setting: Setting) -> Figures:
    """Of each step: once more, once more a step later, and of a step that never was."""
    async with under_streams(setting, core="build_repeating") as (_, streams):
        await _some_answers(streams, setting.num_streams)
        await _still_the_same(streams)
        dropped = await streams.metric("quire:num_dropped_outputs_total")
    assert dropped > 0, "nothing was dropped and counted"
    return {"dropped, results": dropped}


async def clock_that_jumps(setting: Setting) -> Figures:
    """An hour ahead, back, and an hour behind, in the server and in the engine: nobody's time is over."""
    with private_folder() as folder:
        clock = folder / "clock"
        clock.write_text("0", encoding="utf-8")
        async with under_streams(setting, PACED_CLOCK=str(clock)) as (_, streams):
            for error in (_HOUR, 0, -_HOUR, 0, _HOUR, -_HOUR):
                clock.write_text(str(error), encoding="utf-8")
                await _some_answers(streams, _STREAMS_PER_HOUR)
                _, answer = await streams.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 1})
                told = json.loads(answer)["created"] - time.time()
                assert abs(told - error) < 60, f"the server's clock is wrong by {told:.0f} s, not by {error} s"
            await _still_the_same(streams)
            assert not await streams.metric("quire:requests_aborted_total")
    return {"jumps, times": 6}


async def _some_answers(streams: LiveStreams, count: int) -> None:
    """Until so many more streams have ended."""
    wanted = streams.history.counts()[FINISHED] + count
    async with asyncio.timeout(60):
        while streams.history.counts()[FINISHED] < wanted:
            await asyncio.sleep(0.02)


async def _still_the_same(streams: LiveStreams) -> None:
    """The engine of the beginning, and its answers."""
    assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
    restarts, stalls = await streams.metrics("quire:engine_restarts_total", "quire:engine_stalls_total")
    assert (restarts, stalls) == (0, 0)


CASES = (
    Case("F14", "garbage on the socket inside", garbage_on_the_socket_inside, times=1),
    Case("F16", "the clock jumps by an hour", clock_that_jumps, times=1),
    Case("F21", "results that nobody waits for", results_that_nobody_waits_for, times=1),
)

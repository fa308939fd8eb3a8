"""A short request among very many long prompts: it comes through, and nobody waits without a word.

    python -m tests.support.load fair --engine embedded --streams 64

First somebody asks for ten tokens on an otherwise idle server, again and again. Then he does the same while so many
streams send prompts that nearly fill the model's context, no two alike, one after the other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

from tests.support.load.figures import percentiles
from tests.support.load.plain_client import PlainClient
from tests.support.load.probe import Probe, probing
from tests.support.load.servers import LoadedServer, allow_connections
from tests.support.load.streams import Seen, stream_once

MOST_RATIO = 20.0
_SHORT = {"prompt": [5, 6, 7, 8], "max_tokens": 10, "temperature": 0, "ignore_eos": True}
_LONG_OUTPUT = 8
_LEAST_TOKEN, _MOST_TOKEN = 5, 300
QUEUE_SECONDS = 60.0


def fair(
    engine: str,
    num_streams: int,
    seconds: float,
    seed: int,
    *,
    policy: str = "two_level",
    budget: int = 2048,
    priority: int = 0,
) -> dict[str, Any]:
    """One load, and what became of it; `seconds` are those of each of its two parts. Of the server: the `policy` of its
    scheduler and the token `budget` of a step; of the short request: its `priority`."""
    allow_connections(num_streams)
    options = {"--max-queue-seconds": QUEUE_SECONDS, "--scheduling-policy": policy, "--max-num-batched-tokens": budget}
    with LoadedServer(engine, *(str(word) for pair in options.items() for word in pair)) as server:
        short = {**_SHORT, "priority": priority}
        return asyncio.run(_fair(server.place(), short, num_streams, seconds, random.Random(seed)))


async def _fair(
    place: tuple[str, int], short: dict[str, Any], num_streams: int, seconds: float, draw: random.Random
) -> dict[str, Any]:
    length = await _context_of(place) - _LONG_OUTPUT
    async with probing(place, short) as alone:
        await asyncio.sleep(seconds)
    seen: list[Seen] = []
    end = 0.0

    async def send_long_prompts() -> None:
        while time.monotonic() < end:
            prompt = [draw.randint(_LEAST_TOKEN, _MOST_TOKEN) for _ in range(length)]
            seen.append(await stream_once(place[1], prompt, _LONG_OUTPUT))

    async with probing(place, short) as beside:
        end = time.monotonic() + seconds
        await asyncio.gather(*(send_long_prompts() for _ in range(num_streams)))
    usual, now = percentiles(alone.seconds), percentiles(beside.seconds)
    return {
        "long_streams": num_streams,
        "prompt_tokens": length,
        "long_prompts": dict(Counter(one.status for one in seen)),
        "long_first_token": percentiles([one.first for one in seen if one.status == 200]),
        "longest_silence": round(max(one.silence for one in seen), 2),
        "seconds_alone": usual,
        "seconds_beside": now,
        "times": {name: round(now[name] / usual["p50"], 1) for name in ("p50", "p99", "p100")},
        "failed": _failed(alone, beside, seen),
    }


def _failed(alone: Probe, beside: Probe, seen: list[Seen]) -> list[str]:
    """A long prompt may be refused for want of room, in words."""
    failed = [*alone.wrong, *beside.wrong][:20]
    for one in seen:
        is_refused = one.status in (429, 503) and one.retry_after is not None
        if not is_refused and not (one.status == 200 and one.is_done and one.num_events):
            failed.append(f"a long prompt: status {one.status}, {one.num_events} events, end: {one.is_done}")
    if percentiles(beside.seconds)["p100"] > MOST_RATIO * percentiles(alone.seconds)["p50"]:
        failed.append("time of a short request")
    if max(one.silence for one in seen) > QUEUE_SECONDS:
        failed.append("somebody waited in silence")
    return failed


async def _context_of(place: tuple[str, int]) -> int:
    """Tokens that the model takes."""
    client = PlainClient(*place)
    answer = await client.get("/v1/models")
    client.close()
    return int(answer.json()["data"][0]["max_model_len"])

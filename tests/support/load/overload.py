"""Four times what a server can do: whoever is accepted is served nearly as fast as otherwise, others hear so at once.

The server is real, on a core that answers at a pace (null_core), in processes of its own; requests arrive at random.
Judged: every request has one answer, accepted + rejected = sent on both sides, time to the first token of those that
were accepted, time of a refusal, memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from typing import Any

from tests.support.load.figures import note, percentile
from tests.support.load.streams import Seen, stream_once
from tests.support.null_core import PACE

STEPS_A_SECOND, ROWS, NUM_TOKENS = 25, 8, 20
# what the core can do: each request takes a row for so many steps
CAPACITY = ROWS * STEPS_A_SECOND / NUM_TOKENS
# A queue of one second: how long it may be is the operator's choice, and this bound is how it is said.
QUEUE = int(CAPACITY)
MOST_RATIO, MOST_REFUSAL_SECONDS, MOST_GROWTH_MIB = 2.0, 0.05, 32


async def overload(seconds: float, seed: int) -> dict[str, Any]:
    """Once at capacity, once at four times that."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.null_server", "--max-num-seqs", str(ROWS), "--max-queued", str(QUEUE),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, PACE: str(STEPS_A_SECOND)},
    )  # fmt: skip
    assert server.stdout is not None
    ready = json.loads(await server.stdout.readline())
    try:
        await arrivals(ready["port"], CAPACITY, 2.0, seed)
        parts = []
        for factor in (1, 4):
            before = _state_of(ready)
            seen = await arrivals(ready["port"], CAPACITY * factor, seconds, seed + factor)
            parts.append(_summary(factor, seen, before, _state_of(ready)))
        return {"capacity_requests_a_second": CAPACITY, "queue": QUEUE, "parts": parts, "failed": _failed(*parts)}
    finally:
        server.terminate()
        await server.wait()


async def arrivals(port: int, rate: float, seconds: float, seed: int) -> list[Seen]:
    """Requests of a Poisson process; each on its own, however the others fare."""
    chance, began, due = random.Random(seed), time.perf_counter(), 0.0
    tasks = []
    while (due := due + chance.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        prompt = [chance.randrange(300) for _ in range(16)]
        tasks.append(asyncio.create_task(stream_once(port, prompt, NUM_TOKENS)))
    return await asyncio.gather(*tasks)


def _state_of(ready: dict[str, Any]) -> dict[str, float]:
    """The server's own counts, and its memory."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ready['port']}/metrics") as answer:
        text = answer.read().decode()
    ends = sum(float(value) for value in re.findall(r"^quire:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))
    refused = sum(float(value) for value in re.findall(r"^quire:rejected_total\{.*\} (\S+)$", text, re.MULTILINE))
    with open(f"/proc/{ready['pid']}/statm") as statm:
        num_pages = int(statm.read().split()[1])
    return {"ended": ends, "rejected": refused, "mib": num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20}


def _summary(factor: int, seen: list[Seen], before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    accepted = [one for one in seen if one.status == 200]
    rejected = [one for one in seen if one.status == 429]
    return {
        "load": factor,
        "sent": len(seen),
        "accepted": len(accepted),
        "rejected": len(rejected),
        "others": dict(Counter(one.status for one in seen if one.status not in (200, 429))),
        "server_ended": int(after["ended"] - before["ended"]),
        "server_rejected": int(after["rejected"] - before["rejected"]),
        "without_retry_after": sum(one.retry_after is None for one in rejected),
        "not_ended_well": sum(not (one.is_done and one.num_events) for one in accepted),
        "first_token_p50": percentile([one.first for one in accepted], 50),
        "first_token_p99": percentile([one.first for one in accepted], 99),
        **note("first_token_p99", len(accepted)),
        "refusal_p99": percentile([one.first for one in rejected], 99),
        **note("refusal_p99", len(rejected)),
        "growth_mib": round(after["mib"] - before["mib"], 1),
    }


def _failed(once: dict[str, Any], four_times: dict[str, Any]) -> list[str]:
    """Goals that were missed."""
    failed = []
    for part in (once, four_times):
        is_exact = part["accepted"] + part["rejected"] == part["sent"] and not part["others"]
        is_agreed = (part["accepted"], part["rejected"]) == (part["server_ended"], part["server_rejected"])
        if not is_exact or not is_agreed or part["not_ended_well"] or part["without_retry_after"]:
            failed.append(f"load {part['load']}: sums or ends")
    if not four_times["rejected"]:
        failed.append("nothing was refused")
    if four_times["first_token_p99"] > MOST_RATIO * once["first_token_p99"]:
        failed.append("first token")
    if four_times["refusal_p99"] > MOST_REFUSAL_SECONDS:
        failed.append("refusal")
    if four_times["growth_mib"] > MOST_GROWTH_MIB:
        failed.append("memory")
    return failed

"""Very many streams at once: each ends once and says what it would say alone, and the server answers meanwhile.

    python -m quire.testing.load concurrent --engine embedded --streams 512
    python -m quire.testing.load concurrent --engine null --streams 1024

All connections are open before the first one asks. While they are answered somebody asks for /health/live ten times a
second. On the null engine half of the streams wait for a row.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

from quire.testing.load.many import COMMANDS, address_of
from quire.testing.load.plain_client import PlainClient
from quire.testing.server_process import ServerProcess

NUM_TOKENS = 64
_PATH = "/v1/completions"
_NUM_PROMPTS = 16
_MOST_HEALTH_SECONDS = {99: 0.1, 100: 1.0}


def concurrent(engine: str, num_streams: int) -> dict[str, Any]:
    """One load, and what became of it."""
    command = COMMANDS[engine]
    if engine == "null":
        command = [*command, "--max-num-seqs", str(num_streams // 2)]
    with ServerProcess(command) as server:
        return asyncio.run(_streams(*address_of(server, engine), num_streams))


async def _streams(host: str, port: int, num_streams: int) -> dict[str, Any]:
    bodies = [_fields(number) for number in range(_NUM_PROMPTS)]
    right = []
    for body in bodies:
        client = PlainClient(host, port)
        alone = await client.post(_PATH, {**body, "stream": False})
        client.close()
        assert alone is not None
        right.append(alone.texts())
    clients = [PlainClient(host, port) for _ in range(num_streams)]
    for client in clients:
        await client.connect()
    wrong: list[str] = []
    statuses: Counter[int] = Counter()

    async def ask(number: int, client: PlainClient) -> None:
        answer = await client.post(_PATH, bodies[number % _NUM_PROMPTS], patience=600)
        client.close()
        assert answer is not None
        statuses[answer.status] += 1
        if answer.status != 200 or not answer.is_whole or answer.texts() != right[number % _NUM_PROMPTS]:
            wrong.append(f"stream {number}: status {answer.status}: {answer.body[-200:]!r}")

    probe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.testing.load.probe", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    began = time.monotonic()
    await asyncio.gather(*(ask(number, client) for number, client in enumerate(clients)))
    seconds = time.monotonic() - began
    waits = sorted(json.loads((await probe.communicate(b""))[0]))
    health = {percent: round(waits[min(len(waits) - 1, len(waits) * percent // 100)], 4) for percent in (50, 99, 100)}
    slow = [f"/health/live p{percent}" for percent, most in _MOST_HEALTH_SECONDS.items() if health[percent] > most]
    return {
        "streams": num_streams,
        "statuses": dict(statuses),
        "seconds": round(seconds, 1),
        "tokens_a_second": round(num_streams * NUM_TOKENS / seconds),
        "health_seconds": health,
        "failed": [*wrong[:20], *slow],
    }


def _fields(number: int) -> dict[str, Any]:
    prompt = f"Number {number} is"
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}

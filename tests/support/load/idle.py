"""Very many connections that do nothing, or next to nothing: nobody else is to notice them.

    python -m tests.support.load idle --idle 4096 --loris 1000

First somebody asks for completions on an otherwise idle server. Then he does the same while thousands of connections
that have asked once are kept open, and a thousand others send a head that never ends, a byte a second, and come again
when the server has closed them. In the end those that were idle all ask once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from tests.support.load.figures import percentile, percentiles
from tests.support.load.leaks import Processes
from tests.support.load.plain_client import PlainClient
from tests.support.load.probe import probing
from tests.support.load.servers import LoadedServer, allow_connections

MOST_RATIO, MOST_GROWTH_MIB, MOST_LORIS_SECONDS = 2.0, 200.0, 15.0
_PATH = "/v1/completions"
_ONE_TOKEN = {"prompt": "Number 1 is", "max_tokens": 1, "temperature": 0}
_NORMAL = {"prompt": "Number 2 is", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "
# connections that are opened at a time
_AT_A_TIME = 32
_BYTE_SECONDS = 1.0
# longer than the load takes
_KEEP_ALIVE = "600"


def idle(
    engine: str, num_idle: int, num_loris: int, seconds: float, *, first_byte_seconds: float = 10.0
) -> dict[str, Any]:
    """One load, and what became of it; `seconds` are those of each of its two parts."""
    allow_connections(num_idle + num_loris)
    options = "--keep-alive-seconds", _KEEP_ALIVE, "--first-byte-seconds", str(first_byte_seconds)
    with LoadedServer(engine, *options) as server:
        load = _Idle(server.place(), Processes(server.pid))
        return asyncio.run(load.run(num_idle, num_loris, seconds))


class _Idle:
    def __init__(self, place: tuple[str, int], processes: Processes) -> None:
        self._place = place
        self._processes = processes
        self._is_over = False
        # of the slow ones: how long each connection lived
        self._lived: list[float] = []

    async def run(self, num_idle: int, num_loris: int, seconds: float) -> dict[str, Any]:
        async with probing(self._place, _NORMAL) as alone:
            await asyncio.sleep(seconds)
        before = sum(self._processes.memory().values())
        clients = [PlainClient(*self._place) for _ in range(num_idle)]
        answered = await self._ask_all(clients)
        slow = [asyncio.create_task(self._be_slow(number / num_loris)) for number in range(num_loris)]
        async with probing(self._place, _NORMAL) as beside:
            await asyncio.sleep(seconds)
        growth = (sum(self._processes.memory().values()) - before) / 2**20
        self._is_over = True
        ended, open_still = await asyncio.wait(slow, timeout=MOST_LORIS_SECONDS + 1) if slow else ((), ())
        for task in open_still:
            task.cancel()
        again = await self._ask_all(clients)
        for client in clients:
            client.close()
        ratio = percentile(beside.seconds, 99) / percentile(alone.seconds, 99)
        failed = [*alone.wrong, *beside.wrong][:20]
        failed += [f"a slow connection: {error!r}" for task in ended if (error := task.exception()) is not None][:20]
        failed += [f"{name}: {count} of {num_idle}" for name, count in answered_badly(num_idle, answered, again)]
        failed += [f"{len(open_still)} slow connections are open still"] if open_still else []
        failed += ["no slow connection was closed"] if num_loris and not self._lived else []
        failed += ["time of others"] if ratio > MOST_RATIO else []
        failed += ["memory"] if growth > MOST_GROWTH_MIB else []
        failed += ["slow connections live too long"] if max(self._lived, default=0) > MOST_LORIS_SECONDS else []
        return {
            "idle": num_idle,
            "loris": num_loris,
            "seconds_alone": percentiles(alone.seconds),
            "seconds_beside": percentiles(beside.seconds),
            "p99_times": round(ratio, 2),
            "growth_mib": round(growth, 1),
            "loris_closed_after": percentiles(self._lived),
            "failed": failed,
        }

    async def _ask_all(self, clients: list[PlainClient]) -> int:
        """Each once, on the connection that it has; how many were answered."""
        slots, num_answered = asyncio.Semaphore(_AT_A_TIME), 0

        async def ask(client: PlainClient) -> None:
            nonlocal num_answered
            async with slots:
                with contextlib.suppress(OSError, EOFError, TimeoutError):
                    answer = await client.post(_PATH, _ONE_TOKEN)
                    num_answered += answer is not None and answer.status == 200

        await asyncio.gather(*(ask(client) for client in clients))
        return num_answered

    async def _be_slow(self, delay: float) -> None:
        """One connection after the other, until the load is over."""
        await asyncio.sleep(delay)
        while not self._is_over:
            reader, writer = await asyncio.open_connection(*self._place)
            began, end = time.monotonic(), asyncio.create_task(reader.read())
            number = 0
            while not end.done():
                with contextlib.suppress(OSError):
                    writer.write(_HEAD[number : number + 1] or b"a")
                number += 1
                await asyncio.wait([end], timeout=_BYTE_SECONDS)
            self._lived.append(time.monotonic() - began)
            with contextlib.suppress(OSError):
                end.result()
            writer.close()


def answered_badly(num_idle: int, first: int, again: int) -> list[tuple[str, int]]:
    """Those that were not answered, by when they asked."""
    return [
        (name, num_idle - count)
        for name, count in (("no answer", first), ("no answer after a time of idleness", again))
        if count != num_idle
    ]

"""Very many streams at once: each ends once and says what it would say alone, and the server answers meanwhile.

    python -m tests.support.load concurrent --engine embedded --streams 512 --waves 20
    python -m tests.support.load concurrent --engine null --streams 1024 --waves 20 --long-prompts 20

All connections are open before the first one asks. Beside them so many prompts are under way that are as large as a
body may be: a model refuses them for their length, the null engine does not, and making tokens of them goes on for
minutes beside the streams. Somebody asks for /health/live ten times a second all the while. On the null engine half of
the streams wait for a row.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

from tests.support.load.figures import buckets, metrics_of, percentiles
from tests.support.load.plain_client import PlainClient
from tests.support.load.probe import Probe, probing
from tests.support.load.servers import LoadedServer, allow_connections

NUM_TOKENS = 64
_PATH = "/v1/completions"
_NUM_PROMPTS = 16
_LONG_BYTES = 8 * 2**20
_LAG = "quire:event_loop_lag_seconds"
_MOST_HEALTH_SECONDS = {"p99": 0.1, "p100": 1.0}
_MOST_LAG_SECONDS = 0.05


def concurrent(engine: str, num_streams: int, num_waves: int = 1, num_long: int = 0) -> dict[str, Any]:
    """Some waves of streams, and what became of them."""
    allow_connections(num_streams + num_long)
    options = ["--max-num-seqs", str(num_streams // 2)] if engine == "null" else []
    with LoadedServer(engine, *options) as server:
        return asyncio.run(_Concurrent(server.place()).run(num_streams, num_waves, num_long))


class _Concurrent:
    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self._bodies = [_fields(number) for number in range(_NUM_PROMPTS)]
        self._right: list[list[str]] = []
        self._wrong: list[str] = []
        self._statuses: Counter[int] = Counter()
        self._long_statuses: Counter[int] = Counter()
        self._long_seconds: list[float] = []
        self._long_body = _long_body()
        self._long: list[asyncio.Task[None]] = []
        # of each wave, until its last stream had ended
        self._wave_seconds: list[float] = []

    async def run(self, num_streams: int, num_waves: int, num_long: int) -> dict[str, Any]:
        for body in self._bodies:
            client = PlainClient(*self._place)
            alone = await client.post(_PATH, {**body, "stream": False})
            client.close()
            assert alone is not None
            self._right.append(alone.texts())
        before = await metrics_of(self._place)
        async with probing(self._place) as probe:
            for _ in range(num_waves):
                await self._wave(num_streams, num_long)
        after = await metrics_of(self._place)
        num_left = await self._leave()
        lags = buckets(before, after, _LAG)
        tokens_a_second = num_waves * num_streams * NUM_TOKENS / sum(self._wave_seconds)
        return {
            "streams": num_streams,
            "waves": num_waves,
            "statuses": dict(self._statuses),
            "wave_seconds": percentiles(self._wave_seconds),
            "tokens_a_second": round(tokens_a_second),
            "long_prompts": {
                "statuses": dict(self._long_statuses),
                "left": num_left,
                "seconds": percentiles(self._long_seconds),
            },
            "health_seconds": percentiles(probe.seconds),
            "loop_lag_at_most": lags,
            "failed": [*self._wrong[:20], *_missed(probe, lags)],
        }

    async def _wave(self, num_streams: int, num_long: int) -> None:
        clients = [PlainClient(*self._place) for _ in range(num_streams)]
        for client in clients:
            await client.connect()
        self._long = [task for task in self._long if not task.done()]
        missing = num_long - len(self._long)
        self._long += [asyncio.create_task(self._ask_long()) for _ in range(missing)]
        began = time.monotonic()
        await asyncio.gather(*(self._ask(number, client) for number, client in enumerate(clients)))
        self._wave_seconds.append(time.monotonic() - began)

    async def _leave(self) -> int:
        """Whoever waits for the answer to a long prompt goes; so many."""
        waiting = [task for task in self._long if not task.done()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return len(waiting)

    async def _ask(self, number: int, client: PlainClient) -> None:
        answer = await client.post(_PATH, self._bodies[number % _NUM_PROMPTS], patience=600)
        client.close()
        assert answer is not None
        self._statuses[answer.status] += 1
        if answer.status != 200 or not answer.is_whole or answer.texts() != self._right[number % _NUM_PROMPTS]:
            self._wrong.append(f"stream {number}: status {answer.status}: {answer.body[-200:]!r}")

    async def _ask_long(self) -> None:
        """It is answered, or refused for its length."""
        client, began = PlainClient(*self._place), time.monotonic()
        try:
            answer = await client.send(_PATH, self._long_body, patience=600)
        except (OSError, EOFError) as error:
            # nobody waits for this task to say so
            self._wrong.append(f"a long prompt: {error!r}")
            return
        finally:
            client.close()
        assert answer is not None
        self._long_statuses[answer.status] += 1
        self._long_seconds.append(time.monotonic() - began)
        if answer.status not in (200, 400, 413):
            self._wrong.append(f"a long prompt: status {answer.status}: {answer.body[-200:]!r}")


def _missed(probe: Probe, lags: dict[str, float]) -> list[str]:
    seen = percentiles(probe.seconds)
    missed = [f"/health/live {name}" for name, most in _MOST_HEALTH_SECONDS.items() if seen[name] > most]
    return [*probe.wrong[:20], *missed, *(["event loop p99"] if lags["p99"] > _MOST_LAG_SECONDS else [])]


def _fields(number: int) -> dict[str, Any]:
    prompt = f"Number {number} is"
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


def _long_body() -> bytes:
    """As large as a body that is text may be."""
    fields = {"max_tokens": 1, "temperature": 0, "prompt": ""}
    room = _LONG_BYTES - len(json.dumps(fields))
    text = " ".join(f"Number {number} is" for number in range(room // len("Number 0 is")))
    return json.dumps({**fields, "prompt": text[:room]}).encode()

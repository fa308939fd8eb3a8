"""Very many requests, each answer compared with what it must be, and memory watched.

    python -m quire.testing.load many --engine null --requests 1000000 --state build/many-null.json
    python -m quire.testing.load many --engine embedded --requests 100000 --state build/many-embedded.json

Of a hundred requests, sixty are streams, ten are left in the middle, ten have two to four answers, five end at a stop
string, five are wrong and must be refused. The right answer of each kind is what the server says when it is asked alone
and whole. The state file sums up pieces: a run that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.testing.load.leaks import Growth, sample
from quire.testing.load.plain_client import PlainClient
from quire.testing.server_process import ServerProcess

_PATH = "/v1/completions"
_CONNECTIONS = 32
_NUM_PROMPTS = 64
_MOST_BYTES_A_REQUEST = 10.0
_SAMPLES = 200
_MOST_WRONG = 20
COMMANDS = {
    "null": ["-m", "quire.testing.null_server"],
    "embedded": ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--num-threads", "1", "--storage-url", "sqlite:///:memory:"],
}  # fmt: skip


@dataclass
class ManyState:
    """The sum over all pieces."""

    num_requests: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    # a piece has a server of its own: process -> (bytes a request, upper end), of each piece that was long enough
    slopes: list[dict[str, tuple[float, float]]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None) -> ManyState:
        if path is None or not path.exists():
            return cls()
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            partial.replace(path)

    def failures(self) -> list[str]:
        """Why this is not good enough; empty: it is."""
        found = list(self.wrong)
        found += [f"{count} answers {status}" for status, count in self.statuses.items() if status >= "5"]
        for slopes in self.slopes:
            found += [
                f"{name} grows by {slope:.1f} (at most {upper:.1f}) bytes a request"
                for name, (slope, upper) in slopes.items()
                if upper > _MOST_BYTES_A_REQUEST
            ]
        return found


@dataclass(frozen=True)
class Request:
    """What is sent, and of which kind it is."""

    kind: str
    fields: dict[str, Any]
    leave_after: float | None = None

    @property
    def key(self) -> str:
        """The same for requests with the same answer: a stream says what a whole answer says."""
        return json.dumps({name: value for name, value in self.fields.items() if name != "stream"}, sort_keys=True)


def request(number: int, seed: int) -> Request:
    """Number `number` of the load."""
    draw = random.Random(f"{seed}:{number}")
    fields: dict[str, Any] = {
        "prompt": f"Number {draw.randrange(_NUM_PROMPTS)} is",
        "max_tokens": draw.randint(1, 16),
        "temperature": 0,
        "ignore_eos": True,
        "stream": draw.random() < 0.6,
    }
    chance = draw.random()
    if chance < 0.1:
        return Request("left", {**fields, "max_tokens": 200}, leave_after=draw.random() * 0.02)
    if chance < 0.2:
        return Request("several", {**fields, "n": draw.randint(2, 4), "seed": 1})
    if chance < 0.25:
        return Request("stopped", {**fields, "stop": [" the", "e"]})
    if chance < 0.3:
        return Request("refused", {**fields, **draw.choice([{"temperature": 9}, {"n": 0}, {"max_tokens": "x"}])})
    return Request("plain", fields)


class ManyRequests:
    """One piece: a server, connections that ask in turn, and the answers that they must get."""

    def __init__(self, place: tuple[str, int], pid: int, state: ManyState, seed: int) -> None:
        self._place = place
        self._pid = pid
        self._state = state
        self._seed = seed
        self._kinds = Counter(state.kinds)
        self._statuses = Counter(state.statuses)
        self._right: dict[str, list[str]] = {}
        self._growth: dict[str, Growth] = {}
        self._next = state.num_requests

    async def run(self, num_requests: int, seconds: float) -> None:
        """Up to so many requests in all, or for so long."""
        began, first = time.monotonic(), self._state.num_requests
        end = began + seconds
        every = max(100, (num_requests - first) // _SAMPLES)

        async def ask_in_turn() -> None:
            client = PlainClient(*self._place)
            while self._next < num_requests and time.monotonic() < end and len(self._state.wrong) < _MOST_WRONG:
                number = self._next
                self._next += 1
                await self._ask(client, request(number, self._seed))
                self._state.num_requests += 1
                if self._state.num_requests % every == 0:
                    self._take_sample(self._state.num_requests - first)
            client.close()

        await asyncio.gather(*(ask_in_turn() for _ in range(_CONNECTIONS)))
        self._state.seconds += time.monotonic() - began
        self._state.kinds, self._state.statuses = dict(self._kinds), dict(self._statuses)
        slopes = {name: growth.slope() for name, growth in self._growth.items() if name in ("server", "engine")}
        self._state.slopes.append({name: slope for name, slope in slopes.items() if slope is not None})

    async def _ask(self, client: PlainClient, asked: Request) -> None:
        self._kinds[asked.kind] += 1
        answer = await client.post(_PATH, asked.fields, leave_after=asked.leave_after)
        if answer is None:
            return
        self._statuses[str(answer.status)] += 1
        if asked.kind == "refused":
            fault = None if answer.status == 400 else f"status {answer.status}, not 400"
        elif answer.status != 200 or not answer.is_whole:
            fault = f"status {answer.status}: {answer.body[-200:]!r}"
        else:
            texts, expected = answer.texts(), await self._expected(asked)
            fault = None if texts == expected else f"{texts!r}, not {expected!r}"
        if fault is not None:
            self._state.wrong.append(f"{asked.key}: {fault}")

    async def _expected(self, asked: Request) -> list[str]:
        """Of the same request, whole, on a connection of its own; asked once."""
        if asked.key not in self._right:
            client = PlainClient(*self._place)
            alone = await client.post(_PATH, {**asked.fields, "stream": False})
            client.close()
            assert alone is not None
            self._right[asked.key] = alone.texts()
        return self._right[asked.key]

    def _take_sample(self, num_requests: int) -> None:
        for name, value in sample(self._pid).items():
            self._growth.setdefault(name, Growth()).add(num_requests, value)


def address_of(server: ServerProcess, engine: str) -> tuple[str, int]:
    """Where it listens, when it is ready."""
    if engine == "null":
        return "127.0.0.1", json.loads(server.wait_for("port"))["port"]
    address = urlsplit(server.wait_ready())
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port


def many(engine: str, num_requests: int, seconds: float, seed: int, path: Path | None) -> ManyState:
    """A piece of the load; the sum of all pieces."""
    state = ManyState.read(path)
    if state.num_requests < num_requests:
        with ServerProcess(COMMANDS[engine]) as server:
            load = ManyRequests(address_of(server, engine), server.pid, state, seed)
            asyncio.run(load.run(num_requests, seconds))
        state.write(path)
    return state

"""Very many requests (mix.py), each answer compared with what it must be, memory watched, and what is left at the end.

    python -m tests.support.load many --engine null --requests 1000000 --state build/many-null.json
    python -m tests.support.load many --engine embedded --requests 100000 --state build/many-embedded.json

The right answer to a request is what the server says when it is asked the same once more, whole; log-probabilities are
those of an idle server. When all have ended, the server must hold nothing more than after its warm-up. The state file
sums up pieces: a run that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.load.leaks import Growth, Processes, left_over, settled
from tests.support.load.mix import Request, fault_of, logprob_questions, request, warm_up
from tests.support.load.plain_client import Choice, PlainClient
from tests.support.load.servers import LoadedServer
from tests.support.server_process import ServerProcess

_PATH = "/v1/completions"
_CONNECTIONS = 32
_MOST_BYTES_A_REQUEST = 10.0
_MOST_LOG_BYTES = 300.0
_IDLE_SECONDS = 60.0
_SAMPLES = 200
# that a request may ask for, of each engine
_MOST_TOKENS = {"null": 200_000, "embedded": 1000}
# a server that is new still fills its caches
_LEAST_FOR_A_SLOPE = 20_000
_MOST_WRONG = 20


@dataclass
class ManyState:
    """The sum over all pieces."""

    num_requests: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    # lines of the log
    log_bytes: int = 0
    # what the server held after a piece and not before it, by name
    left: list[str] = field(default_factory=list)
    # seconds until it held nothing more, of each piece
    idle_after: list[float] = field(default_factory=list)
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
        found = [*self.wrong, *self.left]
        if self.log_bytes > _MOST_LOG_BYTES * self.num_requests:
            found.append(f"the log has {self.log_bytes / self.num_requests:.0f} bytes a request")
        found += [f"{count} answers {status}" for status, count in self.statuses.items() if status >= "5"]
        for slopes in self.slopes:
            found += [
                f"{name} grows by {slope:.1f} (at most {upper:.1f}) bytes a request"
                for name, (slope, upper) in slopes.items()
                if upper > _MOST_BYTES_A_REQUEST
            ]
        return found


class ManyRequests:
    """One piece: a server, connections that ask in turn, and the answers that they must get."""

    def __init__(self, place: tuple[str, int], server: ServerProcess, state: ManyState, seed: int, engine: str) -> None:
        self._place = place
        self._server = server
        self._processes = Processes(server.pid)
        self._state = state
        self._seed = seed
        # a core without a model follows no form
        self._follows_forms = engine == "embedded"
        self._most_tokens = _MOST_TOKENS[engine]
        self._kinds = Counter(state.kinds)
        self._statuses = Counter(state.statuses)
        self._right: dict[str, list[str]] = {}
        # prompt -> its answer with log-probabilities, from an idle server
        self._alone: dict[str, Choice] = {}
        self._growth: dict[str, Growth] = {}

    async def run(self, num_requests: int, seconds: float) -> None:
        """Up to so many requests in all, or for so long; then until nothing is left of them."""
        for fields in logprob_questions():
            [self._alone[fields["prompt"]]] = await self._said_alone(fields)
        await self._ask_all(warm_up(self._most_tokens))
        before, said = await settled(self._place, self._processes), self._server.num_said
        began, first = time.monotonic(), self._state.num_requests
        await self._ask_all(self._load(num_requests, began + seconds), self._count)
        self._state.seconds += time.monotonic() - began
        left, waited = await left_over(self._place, self._processes, before, _IDLE_SECONDS)
        self._state.left += left
        self._state.idle_after.append(waited)
        self._state.log_bytes += self._server.num_said - said
        self._state.kinds, self._state.statuses = dict(self._kinds), dict(self._statuses)
        is_long = self._state.num_requests - first >= _LEAST_FOR_A_SLOPE
        slopes = {role: growth.slope() for role, growth in self._growth.items() if is_long}
        self._state.slopes.append({role: slope for role, slope in slopes.items() if slope is not None})

    def _load(self, num_requests: int, end: float) -> Iterator[Request]:
        """Samples are taken on the way."""
        first, began = self._state.num_requests, time.monotonic()
        every = max(100, (num_requests - first) // _SAMPLES)
        for number in range(first, num_requests):
            if time.monotonic() >= end:
                return
            if (number - first) % every == 0:
                _show(number, num_requests, (number - first) / (time.monotonic() - began + 1e-9))
                for role, num_bytes in self._processes.memory().items():
                    self._growth.setdefault(role, Growth()).add(number - first, num_bytes)
            yield request(number, self._seed)

    async def _ask_all(
        self, requests: Iterator[Request], count: Callable[[Request, int | None], None] = lambda asked, status: None
    ) -> None:
        """On several connections, each in turn, until there are no more or too many were wrong."""

        async def ask_in_turn() -> None:
            client = PlainClient(*self._place)
            for asked in requests:
                count(asked, await self._ask(client, asked))
                if len(self._state.wrong) >= _MOST_WRONG:
                    break
            client.close()

        await asyncio.gather(*(ask_in_turn() for _ in range(_CONNECTIONS)))

    def _count(self, asked: Request, status: int | None) -> None:
        self._state.num_requests += 1
        self._kinds[asked.kind] += 1
        if status is not None:
            self._statuses[str(status)] += 1

    async def _ask(self, client: PlainClient, asked: Request) -> int | None:
        """The status, if an answer was waited for."""
        answer = await client.post(_PATH, asked.fields, leave_after=asked.leave_after)
        if answer is None:
            return None
        if asked.kind == "refused":
            fault = None if answer.status == 400 else f"status {answer.status}, not 400"
        elif answer.status != 200 or not answer.is_whole:
            fault = f"status {answer.status}: {answer.body[-200:]!r}"
        else:
            right = await self._right_texts(asked)
            alone = self._alone.get(asked.fields["prompt"])
            fault = fault_of(asked, answer, right, alone, follows_forms=self._follows_forms)
        if fault is not None:
            self._state.wrong.append(f"{asked.key}: {fault}")
        return answer.status

    async def _right_texts(self, asked: Request) -> list[str]:
        """Asked once."""
        if asked.key not in self._right:
            choices = await self._said_alone(asked.fields)
            self._right[asked.key] = [choice.text for choice in choices]
        return self._right[asked.key]

    async def _said_alone(self, fields: dict[str, Any]) -> list[Choice]:
        """To the same request, whole, on a connection of its own."""
        client = PlainClient(*self._place)
        answer = await client.post(_PATH, {**fields, "stream": False})
        client.close()
        assert answer is not None
        return answer.choices()


def _show(number: int, num_requests: int, a_second: float) -> None:
    """Over the last such line, where somebody looks."""
    if sys.stderr.isatty():
        text = f"{number / num_requests:6.1%}  {number:,} of {num_requests:,} requests, {a_second:,.0f} a second"
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def many(engine: str, num_requests: int, seconds: float, seed: int, path: Path | None) -> ManyState:
    """A piece of the load; the sum of all pieces."""
    state = ManyState.read(path)
    if state.num_requests < num_requests:
        with LoadedServer(engine, *(["--log"] if engine == "null" else [])) as server:
            load = ManyRequests(server.place(), server, state, seed, engine)
            asyncio.run(load.run(num_requests, seconds))
        state.write(path)
    return state

"""Traces on which scheduling policies differ, and the machine that they run on. Used by policies.py."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from traces import SHAREGPT, lengths

from quire.config.device_sheets import device_sheet
from quire.engine_core.executor.modelled import StepWork
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulation import arrivals
from quire.simulation.deployment import deploy
from quire.simulation.traces.drawn import DrawnTrace, at_rate
from quire.simulation.traces.formats import open_trace

VOCAB = 256

# prices of steps, from data sheets
GPU = deploy("llama-3.1-8b", device_sheet("h100"))


@dataclass(frozen=True)
class Engine:
    """The limits of a run."""

    num_slots: int
    max_num_seqs: int
    max_model_len: int
    budget: int = 2048
    block_size: int = 16


class Arrivals:
    """Requests that come at known moments, whatever the engine does."""

    def __init__(self, requests: list[tuple[float, EngineRequest]]) -> None:
        self._requests = sorted(requests, key=lambda pair: (pair[0], pair[1].request_id))[::-1]

    def next_moment(self) -> float | None:
        return self._requests[-1][0] if self._requests else None

    def take(self) -> tuple[float, EngineRequest]:
        return self._requests.pop()

    def ended(self, request: EngineRequest, output: list[int], now: float) -> None:
        """Nobody waits for it."""


class Chats:
    """Users who read an answer before they go on: each prompt is all that was said before, and something new."""

    def __init__(self, num_users: int, num_turns: int, *, seed: int = 3) -> None:
        chance = random.Random(seed)
        stems = [[chance.randrange(VOCAB) for _ in range(768)] for _ in range(4)]
        self._thoughts: list[Iterator[tuple[float, list[int], int]]] = []
        self._heap: list[tuple[float, int, EngineRequest]] = []
        self._num_requests = 0
        for user in range(num_users):
            self._thoughts.append(iter([_turn(chance) for _ in range(num_turns)]))
            self._say(user, chance.choice(stems), 40.0 * chance.random())

    def next_moment(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def take(self) -> tuple[float, EngineRequest]:
        moment, _, request = heapq.heappop(self._heap)
        return moment, request

    def ended(self, request: EngineRequest, output: list[int], now: float) -> None:
        self._say(request.request_id % len(self._thoughts), request.prompt_token_ids + output, now)

    def _say(self, user: int, history: list[int], now: float) -> None:
        turn = next(self._thoughts[user], None)
        if turn is None:
            return
        pause, words, num_output = turn
        # a number that says whose request it is
        number = self._num_requests * len(self._thoughts) + user
        self._num_requests += 1
        heapq.heappush(self._heap, (now + pause, number, request_of(number, history + words, num_output)))


def _turn(chance: random.Random) -> tuple[float, list[int], int]:
    """Seconds of thought, what is said, and how long the answer is."""
    words = [chance.randrange(VOCAB) for _ in range(chance.randint(20, 400))]
    return chance.expovariate(1 / 10.0), words, chance.randint(50, 300)


Source = Arrivals | Chats


@dataclass(frozen=True)
class Trace:
    """`make` gives the same requests every time."""

    name: str
    engine: Engine
    requests: list[tuple[float, EngineRequest]] = field(default_factory=list)
    chats: tuple[int, int] = (0, 0)

    def source(self) -> Source:
        return Arrivals(self.requests) if self.requests else Chats(*self.chats)


def request_of(number: int, prompt: list[int], num_output: int, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=number,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
        seed=number,
        priority=priority,
    )


def _words(chance: random.Random, count: int) -> list[int]:
    return chance.choices(range(VOCAB), k=count)


# ---------------------------------------------------------------------------------------------- the four


def long_ahead(num_short: int = 100) -> Trace:
    """4.5.1: a prompt of 100,000 tokens, and behind it short ones, 40 a second."""
    chance = random.Random(1)
    requests = [(0.0, request_of(0, _words(chance, 100_000), 32))]
    moment = 0.0
    for number in range(1, num_short + 1):
        requests.append((moment, request_of(number, _words(chance, 100), 32)))
        moment += chance.expovariate(40.0)
    return Trace("100,000 tokens ahead", Engine(160_000, 128, 102_400), requests)


def sharegpt(num_requests: int, rate: float, *, urgent_share: float = 0.0) -> Trace:
    """Lengths like ShareGPT's, Poisson arrivals; `rate` 0: all at once. Some may be urgent, of priority -1."""
    chance = random.Random(7)
    moment, requests = 0.0, []
    for number, (num_prompt, num_output) in enumerate(lengths(SHAREGPT, num_requests, 2048)):
        priority = -1 if chance.random() < urgent_share else 0
        requests.append((moment, request_of(number, _words(chance, num_prompt), num_output, priority)))
        moment += chance.expovariate(rate) if rate else 0.0
    return Trace("ShareGPT", SHAREGPT_ENGINE, requests)


SHAREGPT_ENGINE = Engine(24_000, 64, 2048)

# prompts of a stream, in tokens: ordinary short ones, of which eight need less than a step; and such as fill one each
SHORT, STEP_FILLING = (50, 350), (1_500, 2_500)
NUM_SHORT_OUTPUT = 4
LONG, NUM_LONG = 16_384, 5


def stream(seconds: float, short: tuple[int, int] = SHORT, *, load: float = 1.05) -> Trace:
    """Short prompts that keep the budget full for so long, and five of 16,384 tokens near the beginning.

    `load` is what arrives, as a multiple of what full steps can compute. It starts with three steps' worth at once.
    """
    chance = random.Random(11)
    engine = Engine(400_000, 256, 20_000)
    mean = sum(short) / 2 + NUM_SHORT_OUTPUT - 1
    full_step = _seconds_of_full_step(engine.budget)
    rate = load * engine.budget / full_step / mean
    moments = [0.0] * round(3 * engine.budget / mean)
    moment = chance.expovariate(rate)
    while moment < seconds:
        moments.append(moment)
        moment += chance.expovariate(rate)
    requests = [
        (moment, request_of(NUM_LONG + number, _words(chance, chance.randint(*short)), NUM_SHORT_OUTPUT))
        for number, moment in enumerate(moments)
    ]
    for number in range(NUM_LONG):
        requests.append((0.5 + 0.5 * number, request_of(number, _words(chance, LONG), NUM_SHORT_OUTPUT)))
    return Trace(f"stream of {short[0]:,} to {short[1]:,} tokens, {seconds:g} s", engine, requests)


def _seconds_of_full_step(num_tokens: int) -> float:
    layers = GPU.capacity.layers
    num_bytes = 20_000.0 * sum(layer.bytes_per_token for layer in layers)
    pairs = len(layers) * num_tokens * sum(SHORT) / 4
    return float(GPU.costs.seconds(StepWork(16, num_tokens, 16, 20_000.0, num_bytes, pairs)))


def azure(num_requests: int, rate: float, file: str = "") -> Trace:
    """Azure's conversations: the first of the trace, or lengths drawn from its table."""
    return _recorded("Azure's conversations", Engine(450_000, 256, 16_384), "azure-conv", num_requests, rate, file)


def mooncake(num_requests: int, rate: float, file: str = "") -> Trace:
    """Mooncake's, whose prompts are long and begin alike; of lengths that are drawn, none do."""
    return _recorded("Mooncake's conversations", Engine(450_000, 256, 131_072), "mooncake", num_requests, rate, file)


def _recorded(name: str, engine: Engine, lengths_of: str, num_requests: int, rate: float, file: str) -> Trace:
    """Poisson arrivals; `rate` 0: all at once."""
    per_second = rate or 1e6
    drawn_ones = DrawnTrace(lengths_of, per_second, 2 * num_requests).arrivals()
    found = at_rate(open_trace(file), per_second, 2 * num_requests, seed=7) if file else drawn_ones
    fitting = (one for one in found if one.num_prompt_tokens + one.num_output_tokens < engine.max_model_len)
    requests = [
        (one.at if rate else 0.0, arrivals.request_of(one, number, VOCAB))
        for number, one in enumerate(islice(fitting, num_requests))
    ]
    return Trace(name if file else f"{name}, drawn", engine, requests)


def chats(num_turns: int = 8, num_users: int = 450) -> Trace:
    """Many users talk at a time, over a cache that holds the contexts of few of them."""
    return Trace("chats", Engine(48_000, 64, 8192), chats=(num_users, num_turns))

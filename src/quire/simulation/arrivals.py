"""What arrives: when, how long prompt and answer are, and what prompts have in common. Files are read by traces/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from quire.messages import DecodingSpec
from quire.sampling_params import SamplingParams
from quire.simulation.names import ALL_TOKENS, TracedRequest

# told how many requests have arrived, and at which time
Progress = Callable[[int, float], None]


class Arrival(NamedTuple):
    """A request. Its prompt begins with `pieces`, each (name of a content, tokens); the rest is its own."""

    # seconds
    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    pieces: tuple[tuple[int, int], ...] = ()
    # sampled in parallel, or beams
    num_sequences: int = 1
    is_beam_search: bool = False
    priority: int = 0

    def moved_to(self, at: float) -> Arrival:
        """The same at another time."""
        return Arrival(at, *self[1:])


class Trace(Protocol):
    """Arrivals in the order of their times; may be read again."""

    @property
    def name(self) -> str: ...

    @property
    def has_contents(self) -> bool:
        """Whether it says which prompts begin alike; else none do."""

    def arrivals(self) -> Iterator[Arrival]: ...


class Requests:
    """A trace as its clients send it, one by one. Copies of this process go through it each for itself."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        vocab_size: int,
        *,
        num_requests: int = 0,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """`num_requests`: so many there are, if somebody knows. `progress`: told of each."""
        self.num_requests = num_requests
        self._arrivals = enumerate(arrivals)
        self._vocab_size = vocab_size
        self._seed = seed
        self._progress = progress

    def __iter__(self) -> Iterator[tuple[TracedRequest, float]]:
        """With their times."""
        for number, arrival in self._arrivals:
            yield self._request(number, arrival), arrival.at
            if self._progress is not None:
                self._progress(number + 1, arrival.at)

    def take(self, number: int) -> tuple[TracedRequest, float]:
        """This one; those before it are others'."""
        arrival = next(arrival for place, arrival in self._arrivals if place == number)
        return self._request(number, arrival), arrival.at

    def skip_to(self, number: int) -> None:
        """Those before this one are others', and so is the telling."""
        self._progress = None
        for place, _ in self._arrivals:
            if place + 1 == number:
                return

    def skip_all(self) -> None:
        """What is left is others'."""
        for number, arrival in self._arrivals:
            if self._progress is not None and number + 1 == self.num_requests:
                self._progress(number + 1, arrival.at)

    def _request(self, number: int, arrival: Arrival) -> TracedRequest:
        return request_of(arrival, number, self._vocab_size, seed=self._seed)


def request_of(arrival: Arrival, number: int, vocab_size: int, *, seed: int = 0) -> TracedRequest:
    """As a client sends it. The answer has the length that the trace says: nothing else ends it."""
    n = arrival.num_sequences
    sampling = _sampling(n, arrival.num_output_tokens)
    decoding = DecodingSpec(method="beam_search", args={"width": n}) if arrival.is_beam_search else None
    # never sent, so it need not be a list, which would be made an array again
    prompt = cast("list[int]", prompt_of(arrival, number, vocab_size))
    # siblings have the same numbers for what they do not share
    is_alone = n == 1 and decoding is None
    return TracedRequest(
        request_id=number,
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=seed + number,
        decoding=decoding,
        priority=arrival.priority,
        num_common_tokens=sum(length for _, length in arrival.pieces) if is_alone else ALL_TOKENS,
    )


@lru_cache(maxsize=4096)
def _sampling(num_sequences: int, num_tokens: int) -> SamplingParams:
    """Nobody changes them, and checking them takes as long as a step."""
    return SamplingParams(n=num_sequences, max_tokens=num_tokens, ignore_eos=True)


def prompt_of(arrival: Arrival, number: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Tokens that are equal where contents are, and differ in every block where they do not."""
    tokens = np.empty(arrival.num_prompt_tokens, dtype=np.int32)
    place = 0
    for name, length in arrival.pieces:
        _fill(tokens[place : place + length], (name % vocab_size, name // vocab_size % vocab_size))
        place += length
    # three numbers by turns, and not two: no piece looks like it
    _fill(tokens[place:], (number % vocab_size, number // vocab_size % vocab_size, vocab_size - 1))
    return tokens


def _fill(tokens: npt.NDArray[np.int32], numbers: tuple[int, ...]) -> None:
    for turn, number in enumerate(numbers):
        tokens[turn :: len(numbers)] = number

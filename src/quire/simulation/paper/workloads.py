"""Requests as the paper made them (3.6.1): lengths of a dataset, Poisson arrivals.

Of the datasets only means are known, so lengths are quantiles of a gamma distribution with these means, shuffled: few
requests then have the right mean and tail. The same seed gives all systems the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.messages import IntArray
from quire.simulation.arrivals import Arrival
from quire.simulation.paper.assumptions import Assumptions

MAX_MODEL_LEN = 2048
# draws for each quantile that is taken
_OVERSAMPLED = 64


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and outputs, and how an answer is decoded."""

    name: str
    mean_prompt: float
    mean_output: float
    num_sequences: int = 1
    is_beam_search: bool = False
    # tokens with which all prompts begin, beside these
    shared_prefix: int = 0
    # conversations: the last so many tokens of what was said, and an answer of at most as many
    chat_tokens: int = 0
    max_model_len: int = MAX_MODEL_LEN

    def arrivals(self, rate: float, num_requests: int, assumed: Assumptions, seed: int = 0) -> Iterator[Arrival]:
        rng = np.random.default_rng(seed)
        times = rng.exponential(1 / rate, num_requests).cumsum()
        prompts, outputs = self._lengths(rng, num_requests, assumed)
        pieces = ((1, self.shared_prefix),) if self.shared_prefix else ()
        for at, prompt, output in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            yield Arrival(
                at=at,
                num_prompt_tokens=prompt + self.shared_prefix,
                num_output_tokens=output,
                pieces=pieces,
                num_sequences=self.num_sequences,
                is_beam_search=self.is_beam_search,
            )

    def _lengths(self, rng: np.random.Generator, count: int, assumed: Assumptions) -> tuple[IntArray, IntArray]:
        prompts = _quantiles(rng, self.mean_prompt, assumed.variation, count)
        outputs = _quantiles(rng, self.mean_output, assumed.variation, count)
        if self.chat_tokens:
            rounds = rng.integers(0, assumed.most_rounds, count, endpoint=True)
            history = rounds * int(self.mean_prompt + self.mean_output)
            return np.minimum(prompts + history, self.chat_tokens), np.minimum(outputs, self.chat_tokens)
        most = self.max_model_len - self.shared_prefix
        prompts = np.minimum(prompts, most // 2)
        return prompts, np.minimum(outputs, most - prompts)


def _quantiles(rng: np.random.Generator, mean: float, variation: float, count: int) -> IntArray:
    shape = variation**-2
    drawn = np.sort(rng.gamma(shape, mean / shape, count * _OVERSAMPLED))
    lengths = np.maximum(1, np.rint(drawn[_OVERSAMPLED // 2 :: _OVERSAMPLED])).astype(np.int64)
    rng.shuffle(lengths)
    return lengths


# figure 3.11
SHAREGPT = Workload("ShareGPT", 161.31, 337.99)
ALPACA = Workload("Alpaca", 19.31, 58.45)
CHAT = Workload("chat", 161.31, 337.99, chat_tokens=1024)


def translation(num_examples: int, shared_prefix: int, assumed: Assumptions) -> Workload:
    return Workload(
        f"{num_examples}-shot translation", assumed.sentence, assumed.translation, shared_prefix=shared_prefix
    )

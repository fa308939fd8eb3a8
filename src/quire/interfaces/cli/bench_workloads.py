"""The workloads that engines are compared on, as token ids: the same numbers for every engine, and new ones each round.

Only what is asked; who performs it and how long that takes is not known here. `benchmarks/rivals.py` asks the same of
other engines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.sound_sizes import RATE

# Lengths of the batch are drawn with this seed, and scaled so that so many requests have so many tokens in all.
BATCH_SEED = 18_285
BATCH_SIGMA = 0.9
BATCH_REQUESTS = 64
BATCH_PROMPT_TOKENS = 10_335
BATCH_OUTPUT_TOKENS = 8_248
# tokens behind a long prompt that is known
_QUESTION = 32


@dataclass(frozen=True)
class Work:
    """Requests that arrive together; each has a prompt and a number of tokens that it must get.

    `num_answers` above 1 are drawn at temperature 1; otherwise the best token is taken, or with `beam_width` the best
    beams. The end token is ignored.
    """

    prompts: Sequence[Sequence[int]]
    output_lengths: Sequence[int]
    num_answers: int = 1
    beam_width: int = 0
    # tokens at the beginning that all prompts have in common
    shared_prefix: int = 0
    # they were computed before
    is_prefix_known: bool = False

    @property
    def sequences_a_request(self) -> int:
        return max(self.num_answers, self.beam_width, 1)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths) * self.sequences_a_request

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def shortened(self, num_tokens: int) -> Work:
        """The first request alone, with an answer of at most so many tokens."""
        lengths = [min(num_tokens, self.output_lengths[0])]
        return Work(self.prompts[:1], lengths, self.num_answers, self.beam_width)


@dataclass(frozen=True)
class Chains:
    """Agents at work (2.4): each asks, gets an answer, puts what a tool said behind it, and asks again."""

    beginnings: Sequence[Sequence[int]]
    # of each agent, call by call, what comes behind the answer before it
    results: Sequence[Sequence[Sequence[int]]]
    output_length: int

    def shortened(self, num_tokens: int) -> Chains:
        """One agent's first call."""
        return Chains(self.beginnings[:1], [[]], min(num_tokens, self.output_length))


@dataclass(frozen=True)
class Pictures:
    """Requests that arrive together, each a chat with images and a question."""

    # bytes of levels, height x width x 3
    images: Sequence[Sequence[bytes]]
    size: int
    output_length: int

    def shortened(self, num_tokens: int) -> Pictures:
        return Pictures(self.images[:1], self.size, min(num_tokens, self.output_length))


@dataclass(frozen=True)
class Sounds:
    """Requests that arrive together, each a window of sound that is written down."""

    # bytes of levels from -128 to 127, so many a second as the model hears
    sounds: Sequence[bytes]
    rate: int
    output_length: int

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return sum(map(len, self.sounds)) / self.rate

    def shortened(self, num_tokens: int) -> Sounds:
        return Sounds(self.sounds[:1], self.rate, min(num_tokens, self.output_length))


class TokenSource:
    """Token ids from a seed. A round never repeats an earlier one's tokens, or a prefix cache would answer it.

    Where one engine is asked several workloads, each has a name, for the same reason.
    """

    def __init__(self, vocab_size: int, seed: int, number: int, name: str = "") -> None:
        self._draw = random.Random(f"{seed}/{number}/{name}")
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def levels(self, count: int) -> bytes:
        """Of a picture, or of a sound."""
        return self._draw.randbytes(count)


def stream(source: TokenSource, *, input_length: int = 128, output_length: int = 128) -> Work:
    """W1: one request alone."""
    return Work([source.tokens(input_length)], [output_length])


def prompt(source: TokenSource, *, input_length: int = 2048) -> Work:
    """W5: one long prompt, and the first token after it."""
    return Work([source.tokens(input_length)], [1])


def batch(
    source: TokenSource,
    *,
    num_requests: int = BATCH_REQUESTS,
    input_length: float = 0,
    output_length: float = 0,
) -> Work:
    """W2: many at once, of very different lengths; fewer requests are the first ones of more. A mean length of 0 is
    that of the workload."""
    prompt_lengths, output_lengths = batch_lengths(
        input_length or BATCH_PROMPT_TOKENS / BATCH_REQUESTS, output_length or BATCH_OUTPUT_TOKENS / BATCH_REQUESTS
    )
    return Work(
        [source.tokens(length) for length in _repeated(prompt_lengths, num_requests)],
        _repeated(output_lengths, num_requests),
    )


def shared_prefix(
    source: TokenSource,
    *,
    num_requests: int = 32,
    shared_prefix: int = 512,
    input_length: int = 32,
    output_length: int = 32,
) -> Work:
    """W3: prompts that begin with the same tokens; `input_length` are each one's own."""
    prefix = source.tokens(shared_prefix)
    prompts = [prefix + source.tokens(input_length) for _ in range(num_requests)]
    return Work(prompts, [output_length] * num_requests, shared_prefix=shared_prefix)


def with_known_prefix(work: Work, source: TokenSource) -> Work:
    """W3w: the prefix of `work` again, with other tokens behind it."""
    prefix = list(work.prompts[0][: work.shared_prefix])
    prompts = [prefix + source.tokens(len(prompt) - len(prefix)) for prompt in work.prompts]
    return Work(prompts, work.output_lengths, shared_prefix=work.shared_prefix, is_prefix_known=True)


def answers(source: TokenSource, *, num_answers: int = 8, input_length: int = 256, output_length: int = 64) -> Work:
    """W4: several answers to one prompt."""
    return Work([source.tokens(input_length)], [output_length], num_answers=num_answers)


def beams(source: TokenSource, *, beam_width: int = 4, input_length: int = 256, output_length: int = 64) -> Work:
    """W4: the best beams of one prompt."""
    return Work([source.tokens(input_length)], [output_length], beam_width=beam_width)


def long_context(source: TokenSource, *, input_length: int = 32_768, output_length: int = 64) -> list[Work]:
    """W10: one very long prompt, and a second question behind it."""
    work = Work([source.tokens(input_length)], [output_length], shared_prefix=input_length)
    again = Work([[*work.prompts[0], *source.tokens(_QUESTION)]], [output_length], 1, 0, input_length, True)
    return [work, again]


def agents(
    source: TokenSource,
    *,
    num_agents: int = 8,
    num_calls: int = 6,
    shared_prefix: int = 1024,
    input_length: int = 256,
    result_length: int = 256,
    output_length: int = 64,
) -> Chains:
    """W11: agents with the same instructions, each with a task of its own and the results of its tools."""
    prefix = source.tokens(shared_prefix)
    beginnings = [prefix + source.tokens(input_length) for _ in range(num_agents)]
    results = [[source.tokens(result_length) for _ in range(num_calls - 1)] for _ in range(num_agents)]
    return Chains(beginnings, results, output_length)


def pictures(
    source: TokenSource, *, num_requests: int = 4, num_images: int = 1, size: int = 1024, output_length: int = 32
) -> Pictures:
    """W12: images of noise, squares of so many pixels a side."""
    images = [[source.levels(3 * size * size) for _ in range(num_images)] for _ in range(num_requests)]
    return Pictures(images, size, output_length)


def sounds(source: TokenSource, *, num_requests: int = 4, seconds: int = 30, output_length: int = 100) -> Sounds:
    """W13: noise, of so many seconds each; so many tokens are about what is said in half a minute."""
    return Sounds([source.levels(seconds * RATE) for _ in range(num_requests)], RATE, output_length)


def batch_lengths(mean_input: float, mean_output: float) -> tuple[list[int], list[int]]:
    """Prompt and output lengths of the 64 requests, log-normal, with these means."""
    draw = random.Random(BATCH_SEED)
    sizes = [[draw.lognormvariate(0.0, BATCH_SIGMA) for _ in range(BATCH_REQUESTS)] for _ in range(2)]
    return _scaled(sizes[0], round(mean_input * BATCH_REQUESTS)), _scaled(sizes[1], round(mean_output * BATCH_REQUESTS))


def _scaled(sizes: list[float], total: int) -> list[int]:
    """Whole numbers of at least 1 in these proportions; what rounding leaves goes to the greatest."""
    factor = total / sum(sizes)
    lengths = [max(1, round(size * factor)) for size in sizes]
    greatest = max(range(len(lengths)), key=lengths.__getitem__)
    lengths[greatest] = max(1, lengths[greatest] + total - sum(lengths))
    return lengths


def _repeated(lengths: list[int], count: int) -> list[int]:
    return [lengths[number % len(lengths)] for number in range(count)]

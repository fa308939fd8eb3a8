"""What a request gives back. Names and shapes are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Logprob(msgspec.Struct, gc=False):
    """Log-probability of one token at one position; rank 1 is the most probable. The garbage collector does not look at
    it: an answer may have a million of them."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# one dictionary per position: the chosen token and the best ones, by token id
Logprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # with speculation: drafts that were verified, and those of them that were right; known at the end
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """When the parts of a request were over, in seconds of one clock, as the caller's process saw it."""

    queued_ts: float
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        return self.first_token_ts - self.queued_ts


@dataclass(slots=True)
class RequestOutput:
    """A request: its prompt and its sequences so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    # why no more of the prompt was cached (docs/kv-cache.md); None if no more could be
    first_miss: str | None = None
    # where times are asked for: quire.vllm's LLM with disable_log_stats=False
    metrics: RequestStateStats | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    # float32
    vector: NDArray[np.float32]

    @property
    def embedding(self) -> list[float]:
        """The same as a list, as vLLM gives it."""
        values: list[float] = self.vector.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.vector)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class ClassificationOutput:
    """What a head of labels says of a prompt."""

    # of each label, by its number
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A prompt and its labels."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """Two texts and their score; tokens are those of both."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of a prompt, whatever they are: a vector, or what a head of labels says."""

    # float32
    data: NDArray[np.float32]


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and its numbers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation that beam search found: prompt and output together, as vLLM gives it."""

    # of the prompt and of what follows it, the end token included
    tokens: list[int]
    # all of `tokens`, decoded; special tokens are left out unless skip_special_tokens=False
    text: str
    # what follows the prompt, as `generate` gives it
    output_text: str
    cum_logprob: float
    # cum_logprob / number of output tokens ** length_penalty
    score: float
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What beam search found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
    prompt: str | None
    prompt_token_ids: list[int]


@dataclass(slots=True)
class Segment:
    """A piece of a transcript; names are OpenAI's."""

    id: int
    # where its window begins, in hundredths of a second
    seek: int
    # seconds
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    # of the window's tokens
    avg_logprob: float
    compression_ratio: float
    # of the window
    no_speech_prob: float


@dataclass(slots=True)
class Transcript:
    """What was heard."""

    text: str
    # its code
    language: str
    seconds: float
    # where times were asked for, or the sound is longer than a window
    segments: list[Segment] = field(default_factory=list)

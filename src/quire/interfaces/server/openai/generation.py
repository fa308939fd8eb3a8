"""Whole answers: prompts to the engine, outputs back, gathered.

Outputs are always taken as differences, for a stream and for a whole answer, so both give the same text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from quire.engine_client import each_of, items_of
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.openai.running import running
from quire.interfaces.server.openai.work import Counts, Work
from quire.observability.metrics import ServerMetrics
from quire.outputs import Logprobs, PromptLogprobs


@dataclass(slots=True)
class Choice:
    """One answer, whole."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # letters of the text that are reasoning, from and to: whoever takes the text apart says so here
    thoughts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class PromptScores:
    """Log-probabilities of the prompts, which arrive in parts; the first token of a prompt has none."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, PromptLogprobs] = {}

    def add(self, number: int, delta: OutputDelta) -> None:
        if delta.prompt_logprobs is not None:
            self._by_prompt.setdefault(number, [None]).extend(delta.prompt_logprobs)

    def of(self, number: int, num_tokens: int) -> PromptLogprobs:
        """One entry a token. A prompt of one token has no scores, so nothing arrives for it."""
        return self._by_prompt.get(number, [None] * num_tokens)


@dataclass(slots=True)
class Answer:
    """All choices of a request, and what belongs to its prompts."""

    choices: list[Choice]
    prompt_scores: PromptScores
    counts: Counts


async def collect(engine: ServedEngine, work: Work, metrics: ServerMetrics) -> Answer:
    """The whole answer. Choice j of prompt i stands at i * n + j."""
    answer = Answer([Choice() for _ in range(work.num_choices)], PromptScores(), Counts())
    n = work.params.n

    def add(delta: OutputDelta) -> None:
        number = delta.prompt_number
        answer.prompt_scores.add(number, delta)
        answer.choices[number * n + delta.index].add(delta)

    async with running(engine, work, metrics, answer.counts) as deltas:
        await each_of(deltas, add)
    return answer


async def deltas_of(
    engine: ServedEngine, work: Work, metrics: ServerMetrics, counts: Counts
) -> AsyncGenerator[OutputDelta, None]:
    """What is new, as it comes. Closing it aborts what still runs."""
    async with running(engine, work, metrics, counts) as deltas:
        async for delta in items_of(deltas):
            yield delta

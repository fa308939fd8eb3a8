"""Prompts to the engine, outputs back: the part that all generating endpoints share.

Outputs are always taken as differences, for a stream and for a whole answer, so both give the same text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any, cast

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.errors import RequestError
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.access.time_limits import within_time
from quire.interfaces.server.access.visit import Visit, current_visit
from quire.interfaces.server.access.waiting_room import Stay
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.openai import beam_search
from quire.interfaces.server.openai.responses import Usage, usage_of
from quire.interfaces.server.wire.errors import internal, renamed
from quire.observability.metrics import ServerMetrics
from quire.observability.request_observer import RequestObserver
from quire.observability.tracing import current_trace
from quire.outputs import Logprobs, PromptLogprobs

logger = logging.getLogger("quire.server")

# (number of the prompt, what is new in one of its sequences)
PromptDelta = tuple[int, OutputDelta]


@dataclass(slots=True)
class Work:
    """What one HTTP request asks of the engine, checked and not started."""

    prompts: list[list[int]]
    params: GenerationParams
    prepared: list[Any]
    # on whose behalf
    visit: Visit = field(default_factory=current_visit)
    # its places, once it was accepted
    stay: Stay | None = None

    @classmethod
    async def prepare(
        cls,
        engine: ServedEngine,
        prompts: list[list[int]],
        params: GenerationParams,
        *,
        priority: int,
        cache_salt: str,
        names: Mapping[str, str] | None = None,
    ) -> Work:
        """Raises RequestError for what the engine cannot do, before a first byte is sent; `names` are the client's."""
        visit = current_visit()
        visit.check_priority(priority)
        whose: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "tenant": visit.tenancy}
        try:
            prepared = [await engine.prepare(prompt, params, **whose) for prompt in prompts]
        except RequestError as error:
            raise _in_words_of_the_client(error, params, names) from None
        return cls(prompts, params, prepared, visit)

    @classmethod
    async def receive(
        cls,
        engine: ServedEngine,
        pieces: AsyncIterator[str | list[int]],
        params: GenerationParams,
        *,
        priority: int,
        cache_salt: str,
        add_special_tokens: bool,
        names: Mapping[str, str] | None = None,
    ) -> Work:
        """The same for a prompt that is computed while it arrives; it has arrived then, and runs."""
        visit = current_visit()
        visit.check_priority(priority)
        whose: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "tenant": visit.tenancy}
        stay = visit.room.admit(visit.tenant, [(num_sequences(params), 0)], is_arriving=True)
        try:
            with within_time(visit.room, stay, is_arriving=True):
                received = await engine.receive(pieces, params, add_special_tokens=add_special_tokens, **whose)
        except BaseException as error:
            stay.close()
            if isinstance(error, RequestError):
                raise _in_words_of_the_client(error, params, names) from None
            raise
        prompt = received.request.prompt_token_ids
        stay.begin(0)
        stay.add_tokens(num_prompt=len(prompt))
        return cls([prompt], params, [received], visit, stay)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def accepted(self) -> Stay:
        """Places for all its prompts, or 429."""
        if self.stay is None:
            count = num_sequences(self.params)
            self.stay = self.visit.room.admit(self.visit.tenant, [(count, len(prompt)) for prompt in self.prompts])
        return self.stay


def num_sequences(params: GenerationParams) -> int:
    """What a prompt needs places for."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def _in_words_of_the_client(
    error: RequestError, params: GenerationParams, names: Mapping[str, str] | None
) -> RequestError:
    return renamed(error, beam_search.NAMES if isinstance(params, BeamSearchParams) else names or {})


@dataclass(slots=True)
class Counts:
    """For `usage`: filled while outputs pass by."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reasoning_tokens: int = 0

    def usage(self) -> Usage:
        drafts = self.num_drafted_tokens, self.num_accepted_tokens
        generated = self.num_generated_tokens, self.num_cached_tokens
        return usage_of(self.num_prompt_tokens, *generated, *drafts, self.num_reasoning_tokens)


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
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


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
    async with aclosing(deltas_of(engine, work, metrics, answer.counts)) as deltas:
        async for number, delta in deltas:
            answer.prompt_scores.add(number, delta)
            answer.choices[number * n + delta.index].add(delta)
    return answer


async def deltas_of(
    engine: ServedEngine, work: Work, metrics: ServerMetrics, counts: Counts
) -> AsyncGenerator[PromptDelta, None]:
    """What is new, as it comes. Raises 429 before anything, if there is no room. Closing it aborts what still runs."""
    current_trace.get().describe(_asked(engine, work.params))
    with closing(work.accepted()) as stay, within_time(work.visit.room, stay):
        streams = [_stream_of(engine, work, number, metrics, counts) for number in range(len(work.prompts))]
        async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as deltas:
            async for pair in deltas:
                yield pair


def _asked(engine: ServedEngine, params: GenerationParams) -> dict[str, Any]:
    """For traces."""
    return {
        "gen_ai.request.model": engine.config.served_model_name,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
    }


async def _stream_of(
    engine: ServedEngine, work: Work, number: int, metrics: ServerMetrics, counts: Counts
) -> AsyncGenerator[PromptDelta, None]:
    """One prompt's sequences."""
    num_prompt = len(work.prompts[number])
    params = work.params
    observer = metrics.observe_request(num_prompt, time.monotonic(), n=params.n, max_tokens=params.max_tokens)
    counts.num_prompt_tokens += num_prompt
    num_open = work.params.n
    stream = cast(AsyncGenerator[OutputDelta, None], engine.stream(work.prepared[number]))
    stay = work.accepted()
    try:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if delta.num_cached_tokens is not None:
                    stay.begin(number)
                    stay.add_tokens(num_cached=delta.num_cached_tokens)
                    counts.num_cached_tokens += delta.num_cached_tokens
                    observer.started(delta.num_cached_tokens, time.monotonic())
                if delta.token_ids:
                    counts.num_generated_tokens += len(delta.token_ids)
                    stay.add_tokens(num_generated=len(delta.token_ids))
                    observer.tokens(len(delta.token_ids), time.monotonic(), delta.index)
                if delta.finish_reason is not None:
                    counts.num_drafted_tokens += delta.num_drafted_tokens
                    counts.num_accepted_tokens += delta.num_accepted_tokens
                    num_open -= 1
                    _check_end(delta, observer, is_last=num_open == 0)
                yield number, delta
    except Exception:  # one that the core refuses included; who only leaves raises no Exception here
        observer.finished("error", time.monotonic())
        raise
    finally:
        # whoever leaves before the end aborts; without effect if the end was seen
        observer.finished("abort", time.monotonic())


def _check_end(delta: OutputDelta, observer: RequestObserver, *, is_last: bool) -> None:
    """OpenAI's clients know no other ends than stop and length: any other is an error, not a finish reason."""
    if delta.finish_reason not in ("stop", "length"):
        logger.error("a sequence ended with %s: %s", delta.finish_reason, delta.stop_reason)
        observer.finished("error", time.monotonic())
        raise internal("The request failed while it ran.")
    if is_last:
        observer.finished(delta.finish_reason, time.monotonic())


async def _merged(streams: Sequence[AsyncGenerator[PromptDelta, None]]) -> AsyncGenerator[PromptDelta, None]:
    """Several streams as one. The queue is short: what is not taken is merged in the engine's client."""
    queue: asyncio.Queue[PromptDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[PromptDelta, None]) -> None:
        try:
            async with aclosing(stream) as deltas:
                async for pair in deltas:
                    await queue.put(pair)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.ensure_future(pump(stream)) for stream in streams]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

"""What the engine makes of one HTTP request, while it makes it: counted, timed, and ended if it takes too long."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

from quire.engine_client import Stream
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.access.time_limits import within_time
from quire.interfaces.server.access.waiting_room import Stay
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.openai.work import Counts, Work
from quire.interfaces.server.wire.errors import internal
from quire.observability.metrics import ServerMetrics
from quire.observability.request_observer import RequestObserver
from quire.observability.tracing import current_trace

logger = logging.getLogger("quire.server")

# (number of the prompt, what is new in one of its sequences)
PromptDelta = tuple[int, OutputDelta]


@asynccontextmanager
async def running(
    engine: ServedEngine, work: Work, metrics: ServerMetrics, counts: Counts
) -> AsyncIterator[Stream[PromptDelta]]:
    """Starts it. Raises 429 before anything, if there is no room. What still runs at the end is aborted."""
    current_trace.get().describe(_asked(engine, work))
    with closing(work.accepted()) as stay, within_time(work.visit.room, stay):
        prompts: list[_Prompt] = []
        try:
            for number in range(len(work.prompts)):
                prompts.append(await _started(engine, work, number, metrics, counts))
                if len(work.prompts) > 1:
                    # others have their turn between many
                    await asyncio.sleep(0)
            yield prompts[0] if len(prompts) == 1 else _Several(prompts)
        finally:
            for prompt in prompts:
                await prompt.aclose()


def _asked(engine: ServedEngine, work: Work) -> dict[str, Any]:
    """For traces."""
    return {
        "gen_ai.request.model": engine.config.served_model_name,
        "gen_ai.request.choice.count": work.params.n,
        "gen_ai.request.max_tokens": work.params.max_tokens,
        "gen_ai.request.temperature": work.params.temperature,
    }


async def _started(engine: ServedEngine, work: Work, number: int, metrics: ServerMetrics, counts: Counts) -> _Prompt:
    num_tokens, params = len(work.prompts[number]), work.params
    observer = metrics.observe_request(num_tokens, time.monotonic(), n=params.n, max_tokens=params.max_tokens)
    counts.num_prompt_tokens += num_tokens
    try:
        stream = await engine.open(work.prepared[number])
    except BaseException as error:
        observer.finished("error" if isinstance(error, Exception) else "abort", time.monotonic())
        raise
    return _Prompt(number, params.n, stream, work.accepted(), observer, counts)


class _Prompt:
    """One prompt's sequences, as a Stream."""

    def __init__(
        self,
        number: int,
        num_sequences: int,
        stream: Stream[OutputDelta],
        stay: Stay,
        observer: RequestObserver,
        counts: Counts,
    ) -> None:
        self._number = number
        self._num_open = num_sequences
        self._stream = stream
        self._stay = stay
        self._observer = observer
        self._counts = counts

    def tell(self, reader: Callable[[], None]) -> None:
        self._stream.tell(reader)

    @property
    def has_news(self) -> bool:
        return self._stream.has_news

    @property
    def is_done(self) -> bool:
        return self._num_open == 0

    def take(self) -> list[PromptDelta]:
        try:
            number, now = self._number, time.monotonic()
            pairs = []
            for delta in self._stream.take():
                if delta.num_cached_tokens is not None:
                    self._begin(delta.num_cached_tokens, now)
                num_tokens = len(delta.token_ids)
                if num_tokens:
                    self._counts.num_generated_tokens += num_tokens
                    self._stay.add_generated(num_tokens)
                    self._observer.tokens(num_tokens, now, delta.index)
                if delta.finish_reason is not None:
                    self._end(delta)
                pairs.append((number, delta))
            return pairs
        except Exception:  # one that the core refuses included
            self._observer.finished("error", time.monotonic())
            raise

    async def aclose(self) -> None:
        """Whoever leaves before the end aborts; without effect if the end was seen."""
        self._observer.finished("abort", time.monotonic())
        await self._stream.aclose()

    def _begin(self, num_cached_tokens: int, now: float) -> None:
        self._stay.begin(self._number)
        self._stay.add_tokens(num_cached=num_cached_tokens)
        self._counts.num_cached_tokens += num_cached_tokens
        self._observer.started(num_cached_tokens, now)

    def _end(self, delta: OutputDelta) -> None:
        """OpenAI's clients know no other ends than stop and length: any other is an error, not a finish reason."""
        self._num_open -= 1
        self._counts.num_drafted_tokens += delta.num_drafted_tokens
        self._counts.num_accepted_tokens += delta.num_accepted_tokens
        if delta.finish_reason not in ("stop", "length"):
            logger.error("a sequence ended with %s: %s", delta.finish_reason, delta.stop_reason)
            raise internal("The request failed while it ran.")
        if self.is_done:
            self._observer.finished(delta.finish_reason, time.monotonic())


class _Several:
    """Several prompts as one Stream. Those of which something was heard are asked, however many there are."""

    def __init__(self, prompts: list[_Prompt]) -> None:
        self._prompts = prompts
        self._open = set(prompts)
        # in the order in which they were heard; at first nobody knows
        self._heard = dict.fromkeys(prompts)

    def tell(self, reader: Callable[[], None]) -> None:
        for prompt in self._prompts:
            prompt.tell(functools.partial(self._hear, prompt, reader))

    def _hear(self, prompt: _Prompt, reader: Callable[[], None]) -> None:
        self._heard[prompt] = None
        reader()

    @property
    def has_news(self) -> bool:
        return any(prompt.has_news for prompt in self._heard if prompt in self._open)

    @property
    def is_done(self) -> bool:
        return not self._open

    def take(self) -> list[PromptDelta]:
        heard = self._heard
        self._heard = {}
        pairs: list[PromptDelta] = []
        for prompt in heard:
            if prompt in self._open:
                pairs += prompt.take()
                if prompt.is_done:
                    self._open.remove(prompt)
        return pairs

    async def aclose(self) -> None:
        for prompt in self._prompts:
            await prompt.aclose()

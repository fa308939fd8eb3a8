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
from quire.interfaces.server.access.caller import Reservation
from quire.interfaces.server.access.time_limits import within_time
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.openai.work import Counts, Work
from quire.interfaces.server.wire.errors import internal
from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import current_trace

logger = logging.getLogger("quire.server")


@asynccontextmanager
async def running(
    engine: ServedEngine, work: Work, metrics: ServerMetrics, counts: Counts
) -> AsyncIterator[Stream[OutputDelta]]:
    """Starts it. Raises 429 before anything, if there is no room. What still runs at the end is aborted."""
    current_trace.get().describe(_asked(engine, work))
    with closing(work.accepted()) as reservation, within_time(work.caller.admission, reservation):
        streams: list[Stream[OutputDelta]] = []
        watches: list[_Watch] = []
        try:
            for number, prompt in enumerate(work.prompts):
                watches.append(_Watch(number, len(prompt), work, reservation, metrics, counts))
                streams.append(await _opened(engine, work, number, watches[-1]))
                if len(work.prompts) > 1:
                    # others have their turn between many
                    await asyncio.sleep(0)
            yield streams[0] if len(streams) == 1 else Several(streams)
        finally:
            # whoever leaves before the end aborts; without effect if the end was seen
            for watch in watches:
                watch.end("abort")
            for stream in streams:
                await stream.aclose()


async def _opened(engine: ServedEngine, work: Work, number: int, watch: _Watch) -> Stream[OutputDelta]:
    try:
        return await engine.open(work.prepared[number], observer=watch, prompt_number=number)
    except Exception:
        watch.fail()
        raise


def _asked(engine: ServedEngine, work: Work) -> dict[str, Any]:
    """For traces."""
    return {
        "gen_ai.request.model": engine.config.served_model_name,
        "gen_ai.request.choice.count": work.params.n,
        "gen_ai.request.max_tokens": work.params.max_tokens,
        "gen_ai.request.temperature": work.params.temperature,
    }


class _Watch:
    """Counts and times what comes of one prompt, for metrics, quotas and `usage`."""

    def __init__(
        self,
        number: int,
        num_tokens: int,
        work: Work,
        reservation: Reservation,
        metrics: ServerMetrics,
        counts: Counts,
    ) -> None:
        params = work.params
        self._number = number
        self._num_open = params.n
        self._reservation = reservation
        self._observer = metrics.observe_request(num_tokens, time.monotonic(), n=params.n, max_tokens=params.max_tokens)
        self._counts = counts
        counts.num_prompt_tokens += num_tokens

    def see(self, delta: OutputDelta) -> None:
        now = time.monotonic()
        if delta.num_cached_tokens is not None:
            self._reservation.begin(self._number)
            self._reservation.add_tokens(num_cached=delta.num_cached_tokens)
            self._counts.num_cached_tokens += delta.num_cached_tokens
            self._observer.started(delta.num_cached_tokens, now)
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._counts.num_generated_tokens += num_tokens
            self._reservation.add_generated(num_tokens)
            self._observer.tokens(num_tokens, now, delta.index)
        if delta.finish_reason is not None:
            self._see_end(delta)

    def fail(self) -> None:
        self.end("error")

    def end(self, how: str) -> None:
        """Without effect after the first time."""
        self._observer.finished(how, time.monotonic())

    def _see_end(self, delta: OutputDelta) -> None:
        """OpenAI's clients know no other ends than stop and length: any other is an error, not a finish reason."""
        self._num_open -= 1
        self._counts.num_drafted_tokens += delta.num_drafted_tokens
        self._counts.num_accepted_tokens += delta.num_accepted_tokens
        if delta.finish_reason not in ("stop", "length"):
            logger.error("a sequence ended with %s: %s", delta.finish_reason, delta.stop_reason)
            raise internal("The request failed while it ran.")
        if self._num_open == 0:
            self.end(delta.finish_reason)


class Several:
    """Several prompts as one Stream. Those of which something was heard are asked, however many there are."""

    def __init__(self, prompts: list[Stream[OutputDelta]]) -> None:
        self._prompts = prompts
        self._open = set(prompts)
        # in the order in which they were heard; at first nobody knows
        self._heard = dict.fromkeys(prompts)

    def tell(self, reader: Callable[[], None]) -> None:
        for prompt in self._prompts:
            prompt.tell(functools.partial(self._hear, prompt, reader))

    def _hear(self, prompt: Stream[OutputDelta], reader: Callable[[], None]) -> None:
        self._heard[prompt] = None
        reader()

    @property
    def has_news(self) -> bool:
        return any(prompt.has_news for prompt in self._heard if prompt in self._open)

    @property
    def is_done(self) -> bool:
        return not self._open

    def take(self) -> list[OutputDelta]:
        heard = self._heard
        self._heard = {}
        deltas: list[OutputDelta] = []
        for prompt in heard:
            if prompt in self._open:
                deltas += prompt.take()
                if prompt.is_done:
                    self._open.remove(prompt)
        return deltas

    async def aclose(self) -> None:
        for prompt in self._prompts:
            await prompt.aclose()

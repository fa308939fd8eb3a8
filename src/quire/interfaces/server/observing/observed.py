"""What viewers of a running server are shown, at the same cost for one as for a hundred.

Each view is fetched from the engine at most every quarter of a second, and whoever asks meanwhile gets the same bytes.
Owned by the server's state; asked by observe.py. Nothing here holds a text, a token or a key.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from quire.errors import EngineError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.recording import decisions_of
from quire.interfaces.server.process_role import Alone, Siblings
from quire.observability.block_summary import summary_of
from quire.observability.latest import Latest
from quire.observability.metrics import ServerMetrics
from quire.observability.perfetto import perfetto_trace

T = TypeVar("T")
FRESH_SECONDS = 0.25
# a trace is megabytes
_TRACE_SECONDS = 2.0
# An engine in a long step answers late.
_ENGINE_SECONDS = 10.0
_MOST_DECISIONS = 1000


class Shared(Generic[T]):
    """A value that is fetched once for all who ask within `seconds`; they wait for the same answer."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._fetched_at = 0.0

    async def get(self, fetch: Callable[[], Awaitable[T]]) -> T:
        if self._task is None or (self._task.done() and self._is_old(self._task)):
            self._task = asyncio.ensure_future(self._fetch(fetch))
        # a viewer who leaves takes nothing away from the others
        return await asyncio.shield(self._task)

    def _is_old(self, task: asyncio.Task[T]) -> bool:
        failed = task.cancelled() or task.exception() is not None
        return failed or self._clock() - self._fetched_at >= self._seconds

    async def _fetch(self, fetch: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(_ENGINE_SECONDS):
                return await fetch()
        except TimeoutError:
            raise EngineError(f"The engine did not answer within {_ENGINE_SECONDS:.0f} seconds.") from None
        finally:
            self._fetched_at = self._clock()


class DecisionFeed:
    """The last decisions, kept here, so that each viewer may go on from where it was."""

    def __init__(self) -> None:
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_MOST_DECISIONS)
        self._next = 0
        self._now = 0.0
        self._began: float | None = None
        # counts the engines that were seen: another one counts its decisions from 0
        self._epoch = 1

    async def refresh(self, engine: AsyncLLM) -> None:
        reply = await engine.control("recent_decisions", {"since": self._next})
        if self._began not in (None, reply["began"]):
            self._decisions.clear()
            self._epoch += 1
            reply = await engine.control("recent_decisions", {"since": 0})
        for one in decisions_of(reply["decisions"]):
            self._decisions.append({**msgspec.structs.asdict(one), "words": one.words()})
        self._next, self._now, self._began = reply["next"], reply["now"], reply["began"]

    def since(self, number: int) -> dict[str, Any]:
        """Those from this number on; a number of an engine that is gone means all."""
        start = number if number <= self._next else 0
        return {
            "epoch": self._epoch,
            "now": self._now,
            "next": self._next,
            "decisions": [one for one in self._decisions if one["number"] >= start],
        }


class Observed:
    """The four views of one server."""

    def __init__(
        self,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
        siblings: Siblings | None = None,
    ) -> None:
        self._siblings = siblings or Alone()
        self._latest = Latest(metrics, clock)
        self._feed = DecisionFeed()
        self._state: Shared[bytes] = Shared(FRESH_SECONDS, clock)
        self._blocks: Shared[bytes] = Shared(FRESH_SECONDS, clock)
        self._decisions: Shared[None] = Shared(FRESH_SECONDS, clock)
        self._trace: Shared[bytes] = Shared(_TRACE_SECONDS, clock)

    async def state(self, engine: AsyncLLM) -> bytes:
        async def fetch() -> bytes:
            core = await engine.control("observe_state")
            model = {
                "name": engine.config.served_model_name,
                "max_model_len": engine.ready.max_model_len,
                "has_chat_template": engine.renderer.has_chat_template,
                "takes_images": engine.renderer.sees_images,
                "makes": engine.config.facts.makes,
            }
            others = await self._siblings.ask("metrics")
            numbers = self._latest.numbers([other["instruments"] for other in others])
            return _json({"object": "observation.state", "model": model, **numbers, **core})

        return await self._state.get(fetch)

    async def blocks(self, engine: AsyncLLM) -> bytes:
        async def fetch() -> bytes:
            core = await engine.control("observe_blocks")
            return _json({"object": "observation.blocks", "summary": summary_of(core), **core})

        return await self._blocks.get(fetch)

    async def decisions(self, engine: AsyncLLM, since: int) -> bytes:
        await self._decisions.get(lambda: self._feed.refresh(engine))
        return _json({"object": "observation.decisions", **self._feed.since(since)})

    async def trace(self, engine: AsyncLLM) -> bytes:
        async def fetch() -> bytes:
            recording = await engine.recording()
            # megabytes of JSON, made beside the event loop
            return await asyncio.to_thread(lambda: json.dumps(perfetto_trace(recording)).encode())

        return await self._trace.get(fetch)


def _json(value: Any) -> bytes:
    """Bytes become base64."""
    return msgspec.json.encode(value)

"""Requests that run together to their ends: what LLM makes of a call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from quire.engine_client import AsyncEngineClient, RequestStream, TokenDelta
from quire.interfaces.assembly import OutputDelta, OutputGatherer, RequestAssembly
from quire.interfaces.requests import PreparedRequest
from quire.messages import EngineRequest
from quire.outputs import RequestOutput, RequestStateStats
from quire.renderer import Renderer

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Job(Protocol[_T_co]):
    """One prompt on its way, whatever is to become of it."""

    num_output_tokens: int

    @property
    def request(self) -> EngineRequest: ...

    @property
    def needs_each_token(self) -> bool:
        """It looks at what comes when it comes. Others get everything at the end, merged."""

    @property
    def is_finished(self) -> bool: ...

    def push(self, delta: TokenDelta) -> bool:
        """True: the core must drop this sequence."""

    def output(self) -> _T_co:
        """When it is finished."""


class TextJob:
    """One prompt on its way to its texts. They are made at the end, unless a stop string must be looked for."""

    def __init__(self, prepared: PreparedRequest, renderer: Renderer, *, is_timed: bool = False) -> None:
        self.request = prepared.request
        self.needs_each_token = bool(prepared.request.sampling.stop) or is_timed
        self.num_output_tokens = 0
        self._assembly = RequestAssembly(prepared, renderer)
        self._gatherer = OutputGatherer(str(prepared.request.request_id), prepared)
        self._has_failed = False
        self._times = RequestStateStats(time.monotonic()) if is_timed else None

    @property
    def is_finished(self) -> bool:
        return self._assembly.is_finished

    def output(self) -> RequestOutput:
        output = self._gatherer.gathered()
        output.metrics = self._times
        return output

    def push(self, delta: TokenDelta) -> bool:
        """True: a stop string was met, and the core must drop this sequence."""
        new = self._assembly.push(delta)
        self._gatherer.add(new)
        self.num_output_tokens += len(new.token_ids)
        if self._times is not None:
            self._stamp(self._times, new)
        if new.finish_reason == "error" and not self._has_failed:
            # one line a request: its sequences mostly fail together
            self._has_failed = True
            logger.warning("request %d failed: %s", self.request.request_id, new.stop_reason)
        return new.ends_early

    def _stamp(self, times: RequestStateStats, new: OutputDelta) -> None:
        now = time.monotonic()
        if new.num_cached_tokens is not None and not times.scheduled_ts:
            times.scheduled_ts = now
        if new.token_ids:
            times.first_token_ts = times.first_token_ts or now
            times.last_token_ts = now
            times.num_generation_tokens = self.num_output_tokens


async def run_jobs(client: AsyncEngineClient, jobs: Sequence[Job[_T]], on_end: Callable[[Job[_T]], None]) -> list[_T]:
    """The outputs, in the order of the jobs, when all have ended. No task each: whoever waits is woken once."""
    if not jobs:
        return []
    over = asyncio.get_running_loop().create_future()
    running: dict[int, RequestStream] = {}

    def take(job: Job[_T], stream: RequestStream) -> None:
        request_id = job.request.request_id
        if over.done() or request_id not in running or not (job.needs_each_token or stream.has_ended):
            return
        try:
            # what ended the stream may lie behind what came before it
            while stream.has_news and not job.is_finished:
                for delta in stream.take():
                    if job.push(delta):
                        client.abort(request_id, delta.index)
            if job.is_finished:
                running.pop(request_id).close()
                on_end(job)
        except Exception as error:
            over.set_exception(error)
            return
        if not running:
            over.set_result(None)

    for job in jobs:
        job.request.in_bursts = not job.needs_each_token
    at_end = {job.request.request_id for job in jobs if not job.needs_each_token}
    streams = client.open_all([job.request for job in jobs], at_end)
    for job, stream in zip(jobs, streams, strict=True):
        running[job.request.request_id] = stream
        stream.tell(partial(take, job, stream))
    try:
        await over
    finally:
        # only after Ctrl-C or the engine's death
        for stream in running.values():
            stream.close()
    return [job.output() for job in jobs]

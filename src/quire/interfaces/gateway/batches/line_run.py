"""Runs the requests of one input, a bounded number at a time, each until it has an answer.

Knows nothing of where the lines come from and where the results go. An answer that says "not now" is no result: the
request waits and is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from quire.interfaces.gateway.batches.endpoint_calls import Called, EndpointCalls
from quire.interfaces.gateway.batches.input_lines import InputLine

OnAnswer: TypeAlias = Callable[[InputLine, Called], Awaitable[None]]

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
# An engine may die of a request. One that saw so many engines fail is answered with the failure.
_MAX_FAILURES = 4


@dataclass(frozen=True, slots=True)
class LineRunner:
    """What all inputs of a process share: the endpoints, and the number of requests that run at a time."""

    calls: EndpointCalls
    slots: asyncio.Semaphore
    # returns when requests are answered; raises if they never will be
    wait_ready: Callable[[], Awaitable[None]]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self, lines: Iterator[InputLine], on_answer: OnAnswer, tenant: str = "") -> None:
        """Returns when every line has its answer, in whatever order. Cancelling it aborts those that run, and so does
        the first exception of `on_answer` or `wait_ready`, which is raised."""
        try:
            await self._run(lines, on_answer, tenant)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, lines: Iterator[InputLine], on_answer: OnAnswer, tenant: str) -> None:
        async with asyncio.TaskGroup() as group:
            # A slot is taken before a line is read: what waits is in the file and not in memory.
            while True:
                await self.slots.acquire()
                try:
                    line = await asyncio.to_thread(next, lines, None)
                except BaseException:
                    self.slots.release()
                    raise
                if line is None:
                    self.slots.release()
                    return
                task = group.create_task(self._answer(line, on_answer, tenant))
                # also for one that was cancelled before it ran
                task.add_done_callback(lambda _: self.slots.release())

    async def _answer(self, line: InputLine, on_answer: OnAnswer, tenant: str) -> None:
        await on_answer(line, await self._called(line, tenant))

    async def _called(self, line: InputLine, tenant: str) -> Called:
        seconds = _FIRST_WAIT_SECONDS
        num_failures = 0
        body = bytes(line.body)
        while True:
            await self.wait_ready()
            called = await self.calls.call(line.url, body, tenant)
            num_failures += called.has_lost_engine
            if not called.is_temporary or num_failures >= _MAX_FAILURES:
                return called
            await self.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_WAIT_SECONDS)

"""What an asynchronous generator makes, as a Stream: a task of its own asks it for the next when the last was taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Pumped(Generic[_T]):
    """The generator is closed in every case."""

    def __init__(self, items: AsyncGenerator[_T, None]) -> None:
        self._reader: Callable[[], None] = lambda: None
        self._made: list[_T] = []
        self._was_taken = asyncio.Event()
        self._task: asyncio.Future[None] = asyncio.create_task(self._pump(items))
        self._task.add_done_callback(lambda _: self._reader())

    async def _pump(self, items: AsyncGenerator[_T, None]) -> None:
        async with aclosing(items):
            async for item in items:
                self._made.append(item)
                self._was_taken.clear()
                self._reader()
                if self._made:
                    await self._was_taken.wait()

    def tell(self, reader: Callable[[], None]) -> None:
        self._reader = reader

    @property
    def has_news(self) -> bool:
        return bool(self._made) or self._task.done()

    @property
    def is_done(self) -> bool:
        """It has ended, and not with an exception, which `take` raises."""
        has_ended = self._task.done() and not self._made
        return has_ended and not self._task.cancelled() and self._task.exception() is None

    def take(self) -> list[_T]:
        made = self._made
        self._made = []
        self._was_taken.set()
        if not made and self._task.done():
            self._task.result()
        return made

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        # What ended it is kept by the task and knows the frames of this stream, which must not keep the task: in a ring
        # the request and its prompt would be left for the garbage collector.
        self._task = asyncio.get_running_loop().create_future()
        self._task.cancel()


@asynccontextmanager
async def pumped(items: AsyncGenerator[_T, None]) -> AsyncIterator[Pumped[_T]]:
    """For as long as somebody takes."""
    stream = Pumped(items)
    try:
        yield stream
    finally:
        await stream.aclose()

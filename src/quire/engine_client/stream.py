"""Streams: what comes of one request, for its one reader on the event loop.

A reader either is told (`tell`) and takes what there is whenever it is called, which costs no task and no turn of the
loop; or it waits with `news_of`. What it does not take is merged in the mailbox, so it may be as slow as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol, TypeVar

from quire.engine_client.deltas import TokenDelta
from quire.engine_client.mailbox import nobody

_T_co = TypeVar("_T_co", covariant=True)
_T = TypeVar("_T")


class Stream(Protocol[_T_co]):
    """What is read: tokens here, texts and events in the rooms above."""

    def tell(self, reader: Callable[[], None]) -> None:
        """From now on `reader` is called when something has come, in the turn of the loop that brought it; it must not
        raise."""

    @property
    def has_news(self) -> bool:
        """`take` brings something, or raises."""

    @property
    def is_done(self) -> bool:
        """Nothing will come any more, and everything was taken."""

    def take(self) -> Iterable[_T_co]:
        """What has come since the last time; raises what ended the stream."""

    async def aclose(self) -> None:
        """Ends what has not ended. May be called again."""


class RequestStream(Stream[TokenDelta], Protocol):
    """The tokens of one request."""

    @property
    def has_ended(self) -> bool:
        """Nothing more will come; what has come may not be taken yet."""

    def close(self) -> None:
        """Ends what has not ended. May be called again."""


async def items_of(stream: Stream[_T]) -> AsyncIterator[_T]:
    """The same for a reader that waits. Whoever opened the stream closes it."""
    while not stream.is_done:
        await news_of(stream)
        for item in stream.take():
            yield item


async def news_of(stream: Stream[object]) -> None:
    """Until there is something to take."""
    if stream.has_news or stream.is_done:
        return
    waiter = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    stream.tell(wake)
    await waiter


async def each_of(stream: Stream[_T], use: Callable[[_T], None]) -> None:
    """Hands everything to `use` when it comes. The task that waits is woken once, at the end."""
    over = asyncio.get_running_loop().create_future()

    def take() -> None:
        if over.done():
            return
        has_more = True
        try:
            while has_more:
                for item in stream.take():
                    use(item)
                # what ended the stream may lie behind what came before it
                has_more = stream.has_news and not stream.is_done
            if stream.is_done:
                over.set_result(None)
        except Exception as error:
            over.set_exception(error)

    stream.tell(take)
    try:
        take()
        await over
    finally:
        # else stream and function hold each other, and all that they know, until the garbage collector comes
        stream.tell(nobody)

"""How much is done in a turn of the event loop, by all who share the loop. Who finds nothing left waits for the next.

One request after the other keeps its own turns short, and a hundred of them together still make one long turn, in which
nobody else is served. So those who do the same kind of work ask here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial


class Turnstile:
    """First come, first through. Follows the event loop of whoever comes; what waited in one that has ended is over."""

    def __init__(self, most: int) -> None:
        """`most`: what a turn has room for, in whatever is counted. The last one in it may go beyond."""
        self._most = most
        self._num_done = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def left(self) -> int:
        """Of this turn. Looked at before anything is done."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._num_done = 0
            self._waiting.clear()
        return max(0, self._most - self._num_done)

    def take(self, count: int) -> None:
        """So much of it is done now."""
        assert self._loop is not None, "what is left is looked at before"
        if self._num_done == 0:
            self._loop.call_soon(self._next_turn)
        self._num_done += count

    def wait(self, go_on: Callable[[], None]) -> None:
        """Nothing was left. `go_on` is called in a turn that has something; it must not raise."""
        self._waiting.append(go_on)

    async def enter(self, count: int = 1) -> None:
        """Returns in this turn, or in a later one, and so much is done in it."""
        if self.left:
            self.take(count)
            return
        turn = asyncio.get_running_loop().create_future()
        self.wait(partial(self._let_in, turn, count))
        await turn

    def _let_in(self, turn: asyncio.Future[None], count: int) -> None:
        if not turn.done():
            turn.set_result(None)
            self.take(count)

    def _next_turn(self) -> None:
        self._num_done = 0
        # who waits anew stands behind all who wait already
        for _ in range(len(self._waiting)):
            if not self.left:
                break
            self._waiting.popleft()()

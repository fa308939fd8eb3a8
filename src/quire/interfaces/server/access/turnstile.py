"""Few requests begin in one turn of the event loop, however many arrive at once.

To read, check and tokenise a request takes some milliseconds. Of hundreds that come together each would do so before
the loop looks at its sockets again, and /health and all streams would stand still meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST_A_TURN = 4


class Turnstile:
    """First come, first through. Belongs to one event loop."""

    def __init__(self, most: int = MOST_A_TURN) -> None:
        self._most = most
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns in this turn, or in a later one."""
        loop = asyncio.get_running_loop()
        if self._num_begun == 0:
            loop.call_soon(self._next_turn, loop)
        if self._num_begun < self._most:
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < self._most:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            loop.call_soon(self._next_turn, loop)

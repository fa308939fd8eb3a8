"""How much of sounds a server holds at a time: what was decoded stays until all of it is written down."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.interfaces.server.wire.errors import rate_limited
from quire.observability.instruments import Counter
from quire.renderer.sounds import Sound


class SoundRoom:
    def __init__(self, most_bytes: int, rejections: Counter) -> None:
        self._most_bytes = most_bytes
        self._rejections = rejections
        self._turn = asyncio.Lock()
        self.num_bytes = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """To decode one: they come one by one, so that each is counted before there is room for the next. 429 where
        there is none."""
        async with self._turn:
            self._check()
            yield

    def _check(self) -> None:
        if self.num_bytes >= self._most_bytes:
            text = (
                f"The sounds of the requests that this server has take {self.num_bytes >> 20} MiB, and at most "
                f"{self._most_bytes >> 20} MiB are kept. The request was not started. Send it again after the time in "
                "Retry-After."
            )
            self._rejections.add(1, "sounds")
            raise rate_limited(text, 1)

    def hold(self, sound: Sound) -> Callable[[], object]:
        """Counts it until what is returned is called, or until it is gone: not every request begins."""
        num_bytes = sound.features_MF.nbytes
        self.num_bytes += num_bytes
        release = weakref.finalize(sound, self._forget, num_bytes)
        release.atexit = False
        return release

    def _forget(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

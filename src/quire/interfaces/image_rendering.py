"""Prompts with images are rendered beside texts: what takes long to come or to decode holds up only its like.

Owns the slots of both: so many requests have what was fetched for them in memory, and one decodes at a time, which
bounds what pictures of strangers can take. Called by AsyncLLM and the server; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.config.images import ImageConfig
from quire.interfaces.media_fetch import MediaFetcher
from quire.interfaces.text_threads import TextThreads

_T = TypeVar("_T")
_MOST_FETCHING = 6


class ImageRendering:
    def __init__(
        self, config: ImageConfig, fetcher: MediaFetcher | None = None, check_room: Callable[[], None] = lambda: None
    ) -> None:
        """`check_room` raises where there is no room for another image; asked when its turn has come."""
        self._check_room = check_room
        self._fetcher = fetcher or MediaFetcher(config)
        self._slots = asyncio.Semaphore(_MOST_FETCHING)
        self._decoding = asyncio.Lock()
        self._threads = TextThreads(1)

    async def call(self, render: Callable[..., _T], sources: Sequence[tuple[Any, str]], **options: Any) -> _T:
        """render(fetched=...) in a thread, with the bytes behind those sources that are URLs."""
        places = {source: place for source, place in reversed(sources) if _is_remote(source)}
        if not places:
            return await self._decoded(render, **options)
        async with self._slots:
            fetched = await self._fetcher.fetch(places)
            return await self._decoded(render, fetched=fetched, **options)

    async def _decoded(self, render: Callable[..., _T], **options: Any) -> _T:
        async with self._decoding:
            self._check_room()
            return await self._threads.call(render, **options)


def _is_remote(source: Any) -> bool:
    return isinstance(source, str) and source[:5].lower() != "data:"

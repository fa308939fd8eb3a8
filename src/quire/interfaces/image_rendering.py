"""Prompts with media are rendered beside texts: what takes long to come or to decode holds up only its like.

Owns the turns of each kind (images, videos, sounds, vectors): so many requests have what was fetched for them in
memory, and so many are decoded at a time, which bounds what strangers can take. Of those that wait for a turn, the
client goes first that has waited longest since its last one, and none has all of them. Called by AsyncLLM and the
server; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.config.images import ImageConfig
from quire.interfaces.media_fetch import MediaFetcher, Place
from quire.interfaces.text_threads import TextThreads
from quire.renderer.image_parts import Sources

_T = TypeVar("_T")
IMAGES, VIDEOS, SOUNDS, VECTORS = "images", "videos", "sounds", "vectors"
# Of each kind: requests that have what was fetched in memory, and requests that are decoded; each of all, of one client
# that is known, and of those that nobody knows apart. What is decoded is counted only when it is there, so of a client
# it is one at a time. A process that decodes takes up to 320 MiB. No sounds and vectors are fetched.
_MOST = {
    IMAGES: ((6, 3, 6), (2, 1, 1)),
    VIDEOS: ((2, 1, 2), (2, 1, 1)),
    SOUNDS: ((1, 1, 1), (2, 1, 1)),
    VECTORS: ((1, 1, 1), (1, 1, 1)),
}
# Clients whose last turn is known. One that had its last turn before those of all of these is as good as new.
_MOST_REMEMBERED = 1024


class ImageRendering:
    def __init__(
        self,
        config: ImageConfig,
        fetcher: MediaFetcher | None = None,
        check_room: Callable[[], None] = lambda: None,
        client: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`check_room` raises where there is no room for another one; asked when its turn has come. `client`: on whose
        behalf this is called; None: that is not known."""
        self._check_room = check_room
        self._client = client
        self._fetcher = fetcher or MediaFetcher(config)
        self._lanes = {
            kind: _Lane(FairTurns(*fetching), FairTurns(*decoding), TextThreads(decoding[0]))
            for kind, (fetching, decoding) in _MOST.items()
        }

    async def call(
        self, render: Callable[..., _T], sources: Sources | None = None, *, kind: str = VECTORS, **options: Any
    ) -> _T:
        """render(fetched=...) in a thread, with the bytes behind those sources that are URLs. `kind`: of what has no
        sources."""
        sources = sources or Sources()
        if sources:
            kind = VIDEOS if sources.videos else IMAGES
        lane = self._lanes[kind]
        client = self._client()
        places = {
            source: Place(where, name)
            for many, name in ((sources.videos, "video"), (sources.images, "image"))
            for source, where in reversed(many)
            if _is_remote(source)
        }
        if not places:
            return await self._decoded(lane, client, render, **options)
        await lane.fetching.take(client)
        try:
            fetched = await self._fetcher.fetch(places)
            return await self._decoded(lane, client, render, fetched=fetched, **options)
        finally:
            lane.fetching.give_back(client)

    async def _decoded(self, lane: _Lane, client: str | None, render: Callable[..., _T], **options: Any) -> _T:
        await lane.decoding.take(client)
        try:
            self._check_room()
        except BaseException:
            lane.decoding.give_back(client)
            raise
        work = asyncio.ensure_future(lane.threads.call(render, **options))

        def ended(done: asyncio.Future[_T]) -> None:
            lane.decoding.give_back(client)
            if not done.cancelled():
                done.exception()  # whoever asked may have gone

        work.add_done_callback(ended)
        # a thread cannot be stopped: whoever leaves has its turn until it ends
        return await asyncio.shield(work)


def _is_remote(source: Any) -> bool:
    return isinstance(source, str) and source[:5].lower() != "data:"


class FairTurns:
    """So many turns at a time, and of a client no more than its share of them."""

    def __init__(self, most: int, most_of_client: int, most_of_unknown: int) -> None:
        self._most = most
        self._most_of_client = most_of_client
        self._most_of_unknown = most_of_unknown
        self._taken: Counter[str | None] = Counter()
        # by arrival
        self._waiting: dict[asyncio.Future[None], str | None] = {}
        # when each client had its last turn, in this order
        self._last_turn: dict[str | None, int] = {}
        self._num_turns = 0

    async def take(self, client: str | None) -> None:
        """Waits for one; `give_back` must follow."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = client
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, self) is self:  # it had just been handed out
                self.give_back(client)
            raise

    def give_back(self, client: str | None) -> None:
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._taken.total() < self._most:
            # who has left may not know it yet
            candidates = [
                turn for turn, client in self._waiting.items() if not turn.done() and self._may_have_more(client)
            ]
            if not candidates:
                return
            turn = min(candidates, key=lambda candidate: self._last_turn.get(self._waiting[candidate], 0))
            client = self._waiting.pop(turn)
            self._num_turns += 1
            self._last_turn.pop(client, None)
            self._last_turn[client] = self._num_turns
            if len(self._last_turn) > _MOST_REMEMBERED:
                del self._last_turn[next(iter(self._last_turn))]
            self._taken[client] += 1
            turn.set_result(None)

    def _may_have_more(self, client: str | None) -> bool:
        return self._taken[client] < (self._most_of_unknown if client is None else self._most_of_client)


@dataclass(frozen=True)
class _Lane:
    """Of one kind."""

    fetching: FairTurns
    decoding: FairTurns
    threads: TextThreads

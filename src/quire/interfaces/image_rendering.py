"""Prompts with media are rendered beside texts: what takes long to come or to decode holds up only its like.

Owns the turns of each kind (images, videos, sounds, vectors): so many requests have what was fetched for them in
memory, and so many are decoded at a time, which bounds what strangers can take. Of those that wait for a turn, the
client goes first that has waited longest since its last one, and none has all of them. Called by AsyncLLM and the
server; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        # those that wait, of each client by arrival, and how many had come before
        self._waiting: dict[str | None, OrderedDict[asyncio.Future[None], int]] = {}
        self._num_arrivals = 0
        # (its last turn, when the first one came that waits, client) of all that wait and may have more, in order
        self._line: list[tuple[int, int, str | None]] = []
        # when each client had its last turn, in this order
        self._last_turn: OrderedDict[str | None, int] = OrderedDict()
        self._num_turns = 0

    async def take(self, client: str | None) -> None:
        """Waits for one; `give_back` must follow."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._placing(client):
            self._num_arrivals += 1
            self._waiting.setdefault(client, OrderedDict())[turn] = self._num_arrivals
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with self._placing(client):
                    if client in self._waiting:
                        self._waiting[client].pop(turn, None)
            else:  # it had just been handed out
                self.give_back(client)
            raise

    def give_back(self, client: str | None) -> None:
        with self._placing(client):
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._line and self._taken.total() < self._most:
            _, _, client = self._line[0]
            with self._placing(client):
                turn, _ = self._waiting[client].popitem(last=False)
                # who has left may not know it yet
                if not turn.done():
                    self._num_turns += 1
                    self._last_turn[client] = self._num_turns
                    self._last_turn.move_to_end(client)
                    self._taken[client] += 1
                    turn.set_result(None)
            if len(self._last_turn) > _MOST_REMEMBERED:
                with self._placing(forgotten := next(iter(self._last_turn))):
                    del self._last_turn[forgotten]

    @contextmanager
    def _placing(self, client: str | None) -> Iterator[None]:
        """Keeps the line in order while something changes from which the client's place in it follows."""
        if (place := self._place(client)) is not None:
            del self._line[bisect_left(self._line, place)]
        yield
        if not self._waiting.get(client, True):
            del self._waiting[client]
        if (place := self._place(client)) is not None:
            insort(self._line, place)

    def _place(self, client: str | None) -> tuple[int, int, str | None] | None:
        most = self._most_of_unknown if client is None else self._most_of_client
        if client not in self._waiting or self._taken[client] >= most:
            return None
        return self._last_turn.get(client, 0), next(iter(self._waiting[client].values())), client


@dataclass(frozen=True)
class _Lane:
    """Of one kind."""

    fetching: FairTurns
    decoding: FairTurns
    threads: TextThreads

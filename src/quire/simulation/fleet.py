"""Several replicas behind a router, each advanced only as far as somebody could notice.

The router is the engine's own (routing/) and hears what a front hears: a prompt is computed, a request has ended, the
prefix cache has gained or lost blocks, each at its time and, if so asked, later by its age. A replica on which nothing
happens before the next arrival is left where it is; a heap of their next moments says which ones are not.

    arrival at t  ->  replicas whose next moment is before t are advanced  ->  the router hears what happened before
                      t - age  ->  it chooses  ->  that replica is advanced to t and gets the request
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from quire.chain_hashes import ChainHasher, user_key
from quire.messages import CacheChanged, EngineRequest
from quire.routing import POLICIES, Choice, Router
from quire.simulation.deployment import Deployment
from quire.simulation.records import Record
from quire.simulation.replica import Replica, Tell, as_it_is

# of the names of blocks: replicas and router must agree, and runs repeat
_KEY = b"quire simulation"
# requests that one alone expects before it is advanced
_AT_ONCE = 64


class Fleet:
    """`on_end` gets the record of each request that has ended."""

    def __init__(
        self,
        deployment: Deployment,
        num_replicas: int,
        on_end: Callable[[Record], None],
        *,
        policy: str = "least_time",
        age: float = 0.0,
        may_leap: bool = True,
        is_told: bool = False,
    ) -> None:
        """`is_told`: somebody chooses, though there be one."""
        assert policy in POLICIES
        config = deployment.config
        self.router = Router(policy, config.block_size)
        self._age = age
        self._hasher = ChainHasher(config.block_size, _KEY) if config.enable_prefix_caching else None
        self._on_end = on_end
        # what has happened, by time, until it is told of: (time, number of the replica, of the event, what is done)
        self._news: list[tuple[float, int, int, Callable[[], None]]] = []
        self._ended: list[tuple[float, int, Record]] = []
        self._num_news = 0
        # one alone need tell nobody
        self._is_alone = num_replicas == 1 and not is_told
        self.replicas = (
            [Replica(deployment, 0, self._end, may_leap=may_leap)]
            if self._is_alone
            else [
                Replica(
                    deployment.of_replica(number, _KEY),
                    number,
                    self._end,
                    may_leap=may_leap,
                    tell=self._teller(number),
                )
                for number in range(num_replicas)
            ]
        )
        # (before this time nobody need look, at which replica), and by replica the one that counts
        self._moments: list[tuple[float, int]] = []
        self._moment_of = [math.inf] * num_replicas
        for replica in self.replicas:
            ready = replica.core.ready
            self.router.add(
                replica.number,
                seconds_per_token=ready.seconds_per_token,
                seconds_per_step=ready.seconds_per_step,
            )

    def add(self, request: EngineRequest, at: float) -> None:
        """It arrives; nothing arrives before it any more."""
        if self._is_alone:
            # nobody chooses, and steps are made together across those who arrive
            self.replicas[0].expect(request, at)
            if self.replicas[0].num_expected >= _AT_ONCE:
                self.advance(at)
            return
        self.advance(at)
        self.place(request, self.choose(request).replica if len(self.replicas) > 1 else 0, at)

    def place(self, request: EngineRequest, number: int, at: float) -> None:
        """It goes there, wherever it was said to go before. All before that time has happened."""
        replica = self.replicas[number]
        replica.advance(at)
        replica.add(request, at)
        self._look(replica)

    def choose(self, request: EngineRequest) -> Choice:
        """The replica that is to get it, which counts from now on."""
        num_tokens = len(request.prompt_token_ids)
        blocks = self._names_of(request)
        num_sequences = request.sampling.n
        choice = self.router.choose(blocks, num_tokens, num_sequences)
        self.router.begin(request.request_id, choice, blocks, num_tokens, num_sequences)
        return choice

    def advance(self, until: float = math.inf) -> None:
        """All that happens before that time."""
        if self._is_alone:
            self.replicas[0].advance(until)
        moments = self._moments
        while moments and moments[0][0] < until:
            moment, number = heapq.heappop(moments)
            if moment != self._moment_of[number]:
                continue  # it has got a request since
            replica = self.replicas[number]
            replica.make_next()
            self._look(replica)
        news = self._news
        while news and news[0][0] <= until - self._age:
            heapq.heappop(news)[-1]()
        ended = self._ended
        while ended and ended[0][0] < until:
            self._on_end(heapq.heappop(ended)[-1])

    def summary(self) -> dict[str, Any]:
        """What is not said of all its replicas together."""
        return {}

    def _end(self, record: Record) -> None:
        """In the order of their times, whichever replica was advanced first."""
        heapq.heappush(self._ended, (record.ended_at, record.number, record))

    def _look(self, replica: Replica) -> None:
        if self._is_alone:
            return
        moment = replica.next_moment()
        self._moment_of[replica.number] = moment
        if moment < math.inf:
            heapq.heappush(self._moments, (moment, replica.number))

    def _names_of(self, request: EngineRequest) -> Sequence[int]:
        if self._hasher is None:
            return ()
        # requests of a simulation have neither tenants nor images
        root = self._hasher.root(user_key(request))
        return list(map(as_it_is, self._hasher.chain(root, request.prompt_token_ids)))

    # ------------------------------------------------------------------------------------------ what the router hears

    def _teller(self, number: int) -> Tell:
        def tell(at: float, first_tokens: list[int], ended: list[int], changes: list[CacheChanged]) -> None:
            def hear() -> None:
                for request_id in first_tokens:
                    self.router.first_token(request_id)
                for request_id in ended:
                    self.router.end(request_id)
                for change in changes:
                    if change.is_cleared:
                        self.router.cleared(number)
                    self.router.removed(number, change.removed)
                    self.router.stored(number, change.stored)

            self._num_news += 1
            heapq.heappush(self._news, (at, number, self._num_news, hear))

        return tell

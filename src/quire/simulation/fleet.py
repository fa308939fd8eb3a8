"""Several replicas behind a router, in one process or several.

The router is the engine's own (routing/) and hears what a front hears: a prompt is computed, a request has ended, the
prefix cache has gained or lost blocks, each at its time and, if so asked, later by its age.

    arrival at t  ->  steps that begin before t are made  ->  the router hears what happened before t - age  ->
                      it chooses  ->  that replica gets the request

What a step brings follows from where it begins, and no step is shorter than the least one. So whoever has made all that
begin before t knows what is told until then and for that long after it, whoever comes meanwhile. In that time the
router chooses for several who come, and replicas in other processes get on with those who came before.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from quire.engine_core.executor.modelled import StepWork, VirtualClock
from quire.messages import EngineRequest
from quire.routing import POLICIES, Choice, Router
from quire.simulation.arrivals import Requests
from quire.simulation.deployment import Deployment
from quire.simulation.names import TraceHasher, as_it_is
from quire.simulation.records import EngineWork, Record
from quire.simulation.replica import Replica
from quire.simulation.shard import HASH_KEY, Account, ForkedShard, News, Shard

# of the price of a step of one token: prices that were measured need not rise with the work
_CERTAIN = 0.5


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
        forked: tuple[int, Requests] | None = None,
    ) -> None:
        """`forked`: replicas are in so many processes beside this one, and these requests come; else in this one."""
        assert policy in POLICIES
        config = deployment.config
        self.router = Router(policy, config.block_size)
        self._ready = deployment.core(VirtualClock()).ready
        for number in range(num_replicas):
            self.router.add(
                number,
                seconds_per_token=self._ready.seconds_per_token,
                seconds_per_step=self._ready.seconds_per_step,
            )
        self._age = age
        self._hasher = TraceHasher(config.block_size, HASH_KEY) if config.enable_prefix_caching else None
        self._on_end = on_end
        # what was told, until the router hears of it; and those who have ended, until they count
        self._news: list[News] = []
        self._ended: list[tuple[float, int, Record]] = []
        # nothing is told before this time that is not here; the last question was for steps that begin before that one
        self._known_until = -math.inf
        self._asked_until = -math.inf
        self._least_seconds = _CERTAIN * float(deployment.costs.seconds(StepWork(num_rows=1, num_tokens=1)))
        # those that may be refused, which takes no step
        self._doubtful: set[int] = set()
        num_shards = 1 if forked is None else min(forked[0], num_replicas)
        makes = [
            partial(Shard, deployment, range(first, num_replicas, num_shards), may_leap=may_leap)
            for first in range(num_shards)
        ]
        self._shards: list[Shard] | list[ForkedShard]
        self._shards = (
            [make() for make in makes] if forked is None else [ForkedShard(make, forked[1]) for make in makes]
        )
        self._ask(0.0)

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """By number, where they are in this process."""
        (shard,) = self._shards
        assert isinstance(shard, Shard)
        return shard.replicas

    def run(self, requests: Requests) -> None:
        """All of the trace."""
        for request, at in requests:
            self.add(request, at)
        self.advance()

    def add(self, request: EngineRequest, at: float) -> None:
        """It arrives; nothing arrives before it any more."""
        self.advance(at)
        self.place(request, self.choose(request).replica, at)

    def place(self, request: EngineRequest, number: int, at: float) -> None:
        """It goes there, wherever it was said to go before. All before that time has happened."""
        self._shards[number % len(self._shards)].place(request, number, at)
        if not self._is_sure_to_run(request):
            self._doubtful.add(request.request_id)
            self._known_until = min(self._known_until, at)

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
        while self._known_until < until:
            self._hear_answers()
            self._ask(until)
        news = self._news
        while news and news[0].at < until - self._age:
            self._tell_router(heapq.heappop(news))
        ended = self._ended
        while ended and ended[0][0] < until:
            self._on_end(heapq.heappop(ended)[-1])

    def works(self) -> list[EngineWork]:
        """What the devices of each replica did. Nothing comes any more."""
        return [work for _, work, _ in self._accounts]

    def statistics(self) -> list[dict[str, float]]:
        """Of each engine its own numbers."""
        return [numbers for _, _, numbers in self._accounts]

    def summary(self) -> dict[str, Any]:
        """What is not said of all its replicas together."""
        return {}

    @cached_property
    def _accounts(self) -> list[Account]:
        self._hear_answers()
        accounts = [account for shard in self._shards for account in shard.accounts()]
        return sorted(accounts, key=lambda account: account[0])

    # ------------------------------------------------------------------------------------------ what is told when

    def _ask(self, until: float) -> None:
        """All who come before that time have been placed."""
        for shard in self._shards:
            shard.ask(until)
        self._asked_until = until

    def _hear_answers(self) -> None:
        """To the last question."""
        for shard in self._shards:
            news, ended = shard.answer()
            for told in news:
                assert told.at >= self._known_until, "a step was shorter than the least one"
                heapq.heappush(self._news, told)
                self._doubtful.difference_update(told.ended)
            for record in ended:
                heapq.heappush(self._ended, (record.ended_at, record.number, record))
        self._known_until = self._asked_until if self._doubtful else self._asked_until + self._least_seconds

    def _is_sure_to_run(self, request: EngineRequest) -> bool:
        """Plain, and so short that no limit is near."""
        length = len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
        limit = min(self._ready.max_model_len, self._ready.num_blocks * self._ready.block_size // 2)
        return length * request.sampling.n < limit

    def _names_of(self, request: EngineRequest) -> Sequence[int]:
        if self._hasher is None:
            return ()
        return list(map(as_it_is, self._hasher.names_of(request)))

    def _tell_router(self, told: News) -> None:
        router = self.router
        for request_id in told.first_tokens:
            router.first_token(request_id)
        for request_id in told.ended:
            router.end(request_id)
        for change in told.changes:
            if change.is_cleared:
                router.cleared(told.replica)
            router.removed(told.replica, change.removed)
            router.stored(told.replica, change.stored)

"""Replicas that one process advances, each only as far as somebody could notice.

A replica on which nothing happens that anybody is told of is left where it is; a heap of the next moments says which
ones are not. What they tell is kept for whoever asks: the fleet (fleet.py), of which this is a part, or all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from quire.errors import EngineDeadError
from quire.messages import CacheChanged, EngineRequest
from quire.simulation.arrivals import Requests
from quire.simulation.deployment import Deployment
from quire.simulation.forks import Pipe, fork
from quire.simulation.records import EngineWork, Record
from quire.simulation.replica import Replica

# of the names of blocks: replicas and router must agree, and runs repeat
HASH_KEY = b"quire simulation"


class News(NamedTuple):
    """What a replica tells at a time: its how manieth news this is, prompts that are computed, requests that have
    ended, and what its cache has gained and lost. In the order of time, then of replicas."""

    at: float
    replica: int
    number: int
    first_tokens: list[int]
    ended: list[int]
    changes: list[CacheChanged]


# what has become known, and the records of those who have ended
Answer = tuple[list[News], list[Record]]
# of a replica: its number, what its devices did, and its engine's own numbers
Account = tuple[int, EngineWork, dict[str, float]]


class Shard:
    """In this process."""

    def __init__(self, deployment: Deployment, numbers: Iterable[int], *, may_leap: bool = True) -> None:
        self._news: list[News] = []
        self._ended: list[Record] = []
        self.replicas = {
            number: Replica(
                deployment.of_replica(number, HASH_KEY),
                number,
                self._ended.append,
                may_leap=may_leap,
                tell=self._teller(number),
            )
            for number in numbers
        }
        # (before this time nobody need look, at which replica), and by replica the one that counts
        self._moments: list[tuple[float, int]] = []
        self._moment_of = dict.fromkeys(self.replicas, math.inf)

    def place(self, request: EngineRequest, number: int, at: float) -> None:
        """It goes to that replica. Nothing comes before that time any more."""
        replica = self.replicas[number]
        replica.advance(at)
        replica.add(request, at)
        self._look(replica)

    def ask(self, until: float) -> None:
        """Steps that begin before that time are made, as far as somebody is told of them."""
        moments = self._moments
        while moments and moments[0][0] < until:
            moment, number = heapq.heappop(moments)
            if moment != self._moment_of[number]:
                continue  # it has got a request since
            replica = self.replicas[number]
            replica.make_next()
            self._look(replica)

    def answer(self) -> Answer:
        """What they have told."""
        answer = self._news.copy(), self._ended.copy()
        self._news.clear()
        self._ended.clear()
        return answer

    def accounts(self) -> list[Account]:
        return [(number, replica.work, replica.statistics()) for number, replica in self.replicas.items()]

    def _look(self, replica: Replica) -> None:
        moment = replica.next_moment()
        self._moment_of[replica.number] = moment
        if moment < math.inf:
            heapq.heappush(self._moments, (moment, replica.number))

    def _teller(self, replica: int) -> Callable[[float, list[int], list[int], list[CacheChanged]], None]:
        num_told = 0

        def tell(at: float, first_tokens: list[int], ended: list[int], changes: list[CacheChanged]) -> None:
            nonlocal num_told
            num_told += 1
            self._news.append(News(at, replica, num_told, first_tokens, ended, changes))

        return tell


class ForkedShard:
    """In a process of its own, which works from each question to the answer that somebody takes."""

    def __init__(self, make: Callable[[], Shard], requests: Requests) -> None:
        """`requests`: all of the trace, which it goes through for itself."""

        def work(pipe: Pipe) -> None:
            shard = make()
            while (question := pipe.recv()) is not None:
                placed, until = question
                for number, replica in placed:
                    request, at = requests.take(number)
                    shard.place(request, replica, at)
                shard.ask(until)
                pipe.send(shard.answer())
            pipe.send(shard.accounts())

        self._pipe = fork(work)
        self._placed: list[tuple[int, int]] = []

    def place(self, request: EngineRequest, number: int, at: float) -> None:
        """It goes there with the next question."""
        self._placed.append((request.request_id, number))

    def ask(self, until: float) -> None:
        self._send((self._placed, until))
        self._placed.clear()

    def answer(self) -> Answer:
        answer: Answer = self._received()
        return answer

    def accounts(self) -> list[Account]:
        self._send(None)
        accounts: list[Account] = self._received()
        return accounts

    def _send(self, question: tuple[list[tuple[int, int]], float] | None) -> None:
        with _watched():
            self._pipe.send(question)

    def _received(self) -> Any:
        with _watched():
            return self._pipe.recv()


@contextmanager
def _watched() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise EngineDeadError(
            "a process with a part of the replicas has ended; memory may be short. Simulate fewer replicas."
        ) from error

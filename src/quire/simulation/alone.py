"""One engine, and nobody to choose: steps are made together across those who arrive, in several processes if possible.

An engine without a prefix cache that has nothing to do is as it was when it was new. So each process begins at a place
of its own in the trace, with a new engine, and goes on beyond its share until it and the next one have found nothing
to do before the same request. What the next one has made from there on is what it would make itself.

    |-------- share of this process --------|------>
                                            |-------- share of the next one --------|
                                                   ^ the engines of both have nothing to do

Where the engine always has something to do, this process makes all of it, and the others were in vain.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.simulation.arrivals import Requests
from quire.simulation.deployment import Deployment
from quire.simulation.forks import Pipe, fork
from quire.simulation.records import EngineWork, Record
from quire.simulation.replica import Replica

# requests that are expected before it is advanced
_AT_ONCE = 64
# Of so many requests, counted from the first one of the trace, one at most begins a part: a part has sums of its own.
_PART = 64


@dataclass(frozen=True)
class Part:
    """What an engine did until this request found it with nothing to do (-1: until the end), from the last such one."""

    before: int
    work: EngineWork
    statistics: Counter[str]


@dataclass(frozen=True)
class _Next:
    """The process whose share follows: from this request on."""

    first: int
    pipe: Pipe


# what it has made of its share, and of all that follows
_Rest = tuple[list[Part], list[Record]]


class Alone:
    """`on_end` gets the record of each request that has ended."""

    def __init__(
        self, deployment: Deployment, on_end: Callable[[Record], None], *, may_leap: bool = True, processes: int = 1
    ) -> None:
        """`processes`: so many may share the trace."""
        config = deployment.config
        is_new_when_idle = not config.enable_prefix_caching and config.speculation is None
        self._processes = processes if is_new_when_idle else 1
        self._replica = Replica(deployment, 0, self._end, may_leap=may_leap)
        self._on_end = on_end
        self._on_part: Callable[[Part], None] = self._add
        self._work = EngineWork()
        self._statistics = Counter[str]()
        # records come in the order of their times
        self._ended: list[tuple[float, int, Record]] = []
        self._number_of_part = -1
        self._statistics_before = Counter[str]()

    def run(self, requests: Requests) -> None:
        """All of the trace."""
        next_one: _Next | None = None
        for place in range(self._processes - 1, 0, -1):
            next_one = self._fork(requests, requests.num_requests * place // self._processes, next_one)
        self._run(requests, next_one)

    def works(self) -> list[EngineWork]:
        return [self._work]

    def statistics(self) -> list[dict[str, float]]:
        return [dict(self._statistics)]

    def summary(self) -> dict[str, Any]:
        """What is not said of the engine."""
        return {}

    def _run(self, requests: Requests, next_one: _Next | None) -> None:
        """From where they stand."""
        rest: _Rest | None = None
        for part in self._parts(requests):
            self._on_part(part)
            if next_one is None or part.before < next_one.first:
                continue
            if rest is None:
                try:
                    rest = next_one.pipe.recv()
                except (EOFError, OSError):
                    next_one = None  # it was killed, perhaps while it told, so all is made here
                    continue
            if self._takes_over(part.before, *rest):
                requests.skip_all()
                return

    def _fork(self, requests: Requests, first: int, next_one: _Next | None) -> _Next:
        """Whoever makes all from this request on, together with the next one. The engine is new."""

        def work(pipe: Pipe) -> None:
            parts: list[Part] = []
            records: list[Record] = []
            self._on_part = parts.append
            self._on_end = records.append
            requests.skip_to(first)
            self._run(requests, next_one)
            pipe.send((parts, records))

        pipe = fork(work)
        if next_one is not None:
            # that is who hears of it
            next_one.pipe.close()
        return _Next(first, pipe)

    def _takes_over(self, before: int, parts: list[Part], records: list[Record]) -> bool:
        """What was made elsewhere from this request on, if the engine had nothing to do before it there, too."""
        place = next((place for place, part in enumerate(parts) if part.before == before), None)
        if place is None:
            return False
        for part in parts[place + 1 :]:
            self._on_part(part)
        for record in records:
            if record.number >= before:
                self._on_end(record)
        return True

    def _add(self, part: Part) -> None:
        self._work.add(part.work)
        self._statistics.update(part.statistics)

    # ------------------------------------------------------------------------------------------ the engine

    def _parts(self, requests: Requests) -> Iterator[Part]:
        replica = self._replica
        for request, at in requests:
            replica.expect(request, at)
            if replica.num_expected >= _AT_ONCE:
                yield from self._advance(at)
        yield from self._advance(math.inf)
        yield self._part(-1)

    def _advance(self, until: float) -> Iterator[Part]:
        """All that happens before that time."""
        replica = self._replica
        while (number := replica.advance(until)) is not None:
            if number // _PART != self._number_of_part:
                self._number_of_part = number // _PART
                yield self._part(number)
            replica.arrive()
        self._tell(until)

    def _part(self, before: int) -> Part:
        self._tell(math.inf)
        statistics = Counter(self._replica.statistics())
        part = Part(before, self._replica.take_work(), Counter(statistics))
        part.statistics.subtract(self._statistics_before)
        self._statistics_before = statistics
        return part

    def _end(self, record: Record) -> None:
        heapq.heappush(self._ended, (record.ended_at, record.number, record))

    def _tell(self, until: float) -> None:
        ended = self._ended
        while ended and ended[0][0] < until:
            self._on_end(heapq.heappop(ended)[-1])

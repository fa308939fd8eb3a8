"""One engine on its own clock: requests go in at their times, records come out.

It does what the engine's process does: takes what has arrived, makes a step, takes what has arrived meanwhile. Between
two arrivals nobody disturbs it, so it is advanced only when somebody comes, or asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.engine_core.executor.modelled import Floats, ModelledExecutor, StepWork, VirtualClock
from quire.messages import (
    AbortRequests,
    CacheChanged,
    EngineOutputs,
    EngineRequest,
    IntArray,
    SchedulerOutput,
    split_sequence_id,
)
from quire.simulation.deployment import Deployment
from quire.simulation.records import EngineWork, Record


@dataclass(slots=True)
class _Begun:
    """A sequence, of a request; and when it got its last token."""

    record: Record
    last_token_at: float


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Steps to come, as long as nobody disturbs them: who gets a token in each, when the first one begins and when each
    is done."""

    rows: IntArray
    sequence_ids: list[int]
    times: Floats


# (when, requests whose prompts are computed, requests that ended, changes of the cache): what a router hears
Tell = Callable[[float, list[int], list[int], list[CacheChanged]], None]


class Replica:
    """`on_end` gets each record when its request has ended."""

    def __init__(
        self,
        deployment: Deployment,
        number: int,
        on_end: Callable[[Record], None],
        *,
        may_leap: bool = True,
        tell: Tell | None = None,
    ) -> None:
        """`may_leap`: steps in which nothing happens are made together, which changes nothing but the time it takes.
        `tell` is called where a request begins or ends; changes of the cache wait for that."""
        self.number = number
        self._may_leap = may_leap
        self._tell = tell
        self.clock = VirtualClock()
        self.core = deployment.core(self.clock)
        self.work = EngineWork()
        self._on_end = on_end
        self._open: dict[int, Record] = {}
        # those that have a token
        self._begun: dict[int, _Begun] = {}
        assert isinstance(self.core.executor, ModelledExecutor)
        self._executor = self.core.executor
        self._executor.on_step = self._count
        self._pool = self.core.scheduler.manager.pool
        self._last_done_at = 0.0
        self._foreseen: _Foreseen | None = None
        self._has_looked = False
        self._first_tokens: list[int] = []
        self._ended: list[int] = []
        self._changes: list[CacheChanged] = []
        if tell is not None:
            self.core.watch_cache(self._changes.append)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def add(self, request: EngineRequest, at: float) -> None:
        """It arrives now; `advance` has come to this time."""
        self.clock.wait_until(at)
        n = request.sampling.n
        self._open[request.request_id] = Record(
            request.request_id, self.number, at, len(request.prompt_token_ids), num_open=n, num_sequences=n
        )
        self.core.add(request)
        self._forget()

    def abort(self, request_id: int) -> None:
        self.core.abort(AbortRequests(request_ids=[request_id]))
        self._forget()

    def advance(self, until: float = math.inf) -> None:
        """Makes the steps that begin before that time."""
        while self.core.has_work and self.clock.now() < until:
            self.make_next(until)

    def next_moment(self) -> float:
        """Whoever looks at it before this time finds it as it is now, but for tokens that come one by one."""
        if not self.core.has_work:
            return math.inf
        ahead = self._foresee()
        return self.clock.now() if ahead is None else float(ahead.times[-1])

    def make_next(self, until: float = math.inf) -> None:
        """A step, or as many as can be foreseen and begin before that time."""
        ahead = self._foresee()
        self._forget()
        if ahead is None:
            self._take(self.core.step())
            return
        times = ahead.times[: 2 + int(np.searchsorted(ahead.times[1:-1], until))]
        held, outputs = self.core.advance(ahead.rows, self._executor.advance(ahead.rows, times))
        self._take_many(ahead.sequence_ids, times[1:])
        self._count_many(len(ahead.rows), times, held)
        self._take_events(outputs)

    def _forget(self) -> None:
        """What was foreseen has come, or will not."""
        self._foreseen = None
        self._has_looked = False

    def _foresee(self) -> _Foreseen | None:
        """Nothing, where the next step is not like those after it."""
        if not self._has_looked and self._may_leap:
            self._has_looked = True
            rows, num_steps = self.core.steady_horizon()
            if num_steps:
                sequence_ids = self.core.scheduler.rows.sequence_id[rows].tolist()
                if not self._begun.keys() >= set(sequence_ids):
                    num_steps = 1  # a first token is told of when it comes
                self._foreseen = _Foreseen(rows, sequence_ids, self._executor.foresee(rows, num_steps))
        return self._foreseen

    def statistics(self) -> dict[str, float]:
        return self.core.statistics()

    # ------------------------------------------------------------------------------------------ what comes back

    def _take(self, outputs: EngineOutputs) -> None:
        for start in outputs.starts:
            request_id, index = split_sequence_id(start.sequence_id)
            if not index:
                self._open[request_id].num_cached_tokens = start.num_cached_tokens
        now = self.clock.now()
        self.work.gaps.add(self._tokens(outputs.sequence_ids.tolist(), 1, now, now))
        self._take_events(outputs)

    def _take_events(self, outputs: EngineOutputs) -> None:
        now = self.clock.now()
        for end in outputs.ends:
            self._end(end.sequence_id, end.error or "", now)
        if self._tell is not None and (outputs.starts or outputs.ends or self._first_tokens):
            self._tell(now, self._first_tokens, self._ended, list(self._changes))
            self._first_tokens, self._ended = [], []
            self._changes.clear()

    def _take_many(self, sequence_ids: list[int], times: Floats) -> None:
        """Each of these got a token at each of these times."""
        gaps = self._tokens(sequence_ids, len(times), float(times[0]), float(times[-1]))
        weights = np.ones(len(gaps) + len(times) - 1, dtype=np.int64)
        weights[len(gaps) :] = len(sequence_ids)
        self.work.gaps.add(np.concatenate([gaps, times[1:] - times[:-1]]), weights)

    def _tokens(self, sequence_ids: list[int], count: int, first: float, last: float) -> list[float]:
        """So many for each of these sequences. How long those waited for the first that had one before."""
        gaps = []
        for sequence_id in sequence_ids:
            begun = self._begun.get(sequence_id)
            if begun is None:
                begun = self._begin(sequence_id, first)
                if begun is None:
                    continue
            else:
                gaps.append(first - begun.last_token_at)
            begun.last_token_at = last
            record = begun.record
            record.num_output_tokens += count
            record.last_token_at = last
        return gaps

    def _begin(self, sequence_id: int, now: float) -> _Begun | None:
        """It has its first token. None: its request has ended."""
        record = self._open.get(split_sequence_id(sequence_id)[0])
        if record is None:
            return None
        if record.first_token_at < 0:
            record.first_token_at = now
            self._first_tokens.append(record.number)
        begun = self._begun[sequence_id] = _Begun(record, now)
        return begun

    def _end(self, sequence_id: int, error: str, now: float) -> None:
        self._begun.pop(sequence_id, None)
        request_id = split_sequence_id(sequence_id)[0]
        record = self._open[request_id]
        record.error = record.error or error
        record.num_open -= 1
        if not record.num_open:
            record.ended_at = now
            del self._open[request_id]
            self._ended.append(request_id)
            self._on_end(record)

    def _count(self, decision: SchedulerOutput, work: StepWork, done_at: float) -> None:
        seconds = done_at - max(self._last_done_at, self.clock.now())
        self._last_done_at = done_at
        did = self.work
        did.busy_seconds += seconds
        did.num_steps += 1
        did.num_tokens += work.num_tokens
        did.rows_by_step += work.num_rows
        did.row_seconds += work.num_rows * seconds
        did.block_seconds += self._pool.num_held * seconds

    def _count_many(self, num_rows: int, times: Floats, held: IntArray) -> None:
        """As `_count` would, step by step."""
        self._last_done_at = float(times[-1])
        num_steps = len(times) - 1
        did = self.work
        did.num_steps += num_steps
        did.num_tokens += num_rows * num_steps
        did.rows_by_step += num_rows * num_steps
        sums = np.empty((3, num_steps + 1))
        sums[:, 0] = did.busy_seconds, did.row_seconds, did.block_seconds
        seconds = np.subtract(times[1:], times[:-1], out=sums[0, 1:])
        np.multiply(num_rows, seconds, out=sums[1, 1:])
        np.multiply(held, seconds, out=sums[2, 1:])
        # one after the other, so that the bits are those of a loop
        sums = np.add.accumulate(sums, axis=1)
        did.busy_seconds, did.row_seconds, did.block_seconds = sums[:, -1].tolist()

"""One engine on its own clock: requests go in at their times, records come out.

It does what the engine's process does: takes what has arrived, makes a step, takes what has arrived meanwhile. Between
two arrivals nobody disturbs it, so it is advanced only when somebody comes, or asks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.engine_core.executor.modelled import Floats, Join, ModelledExecutor, StepWork, VirtualClock
from quire.messages import (
    AbortRequests,
    CacheChanged,
    EngineOutputs,
    EngineRequest,
    IntArray,
    SchedulerOutput,
    sequence_id_of,
    split_sequence_id,
)
from quire.simulation.deployment import Deployment
from quire.simulation.names import as_it_is, common_names, own_names
from quire.simulation.records import EngineWork, Record


@dataclass(slots=True)
class _Begun:
    """A sequence, of a request; and when it got its last token."""

    record: Record
    last_token_at: float


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Steps to come, as long as nobody disturbs them: in how many, from the first on, each row gets a token, when the
    first one begins and when each is done."""

    rows: IntArray
    steps: IntArray
    sequence_ids: list[int]
    times: Floats
    # what they compute beside a token of each row
    num_more_tokens: int
    # by step, those who come meanwhile
    joins: list[Join]


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
        # whoever is told hears of each end at its time
        self._may_leap_beyond_ends = tell is None
        self.clock = VirtualClock()
        self.core = deployment.core(self.clock)
        self.work = EngineWork()
        self._on_end = on_end
        # those who will arrive: nothing is known of who comes after them
        self._expected: deque[tuple[float, EngineRequest]] = deque()
        self._open: dict[int, Record] = {}
        # those that have a token
        self._begun: dict[int, _Begun] = {}
        assert isinstance(self.core.executor, ModelledExecutor)
        self._executor = self.core.executor
        self._executor.on_step = self._count
        manager = self.core.scheduler.manager
        self._pool = manager.pool
        # a checkpoint is looked for by its name when it is to go
        self._may_hide = self._pool.keeps_contents and not manager.num_state_blocks
        self._block_size = manager.block_size
        self._last_done_at = 0.0
        self._foreseen: _Foreseen | None = None
        self._has_looked = False
        self._first_tokens: list[int] = []
        self._ended: list[int] = []
        self._changes: list[CacheChanged] = []
        if tell is not None:
            self.core.watch_cache(self._hear, as_it_is)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def add(self, request: EngineRequest, at: float) -> None:
        """It arrives now; `advance` has come to this time."""
        self.clock.wait_until(at)
        self._note(request, at)
        self.core.add(request)
        self._forget()

    def expect(self, request: EngineRequest, at: float) -> None:
        """It will arrive then, and nobody between the last one that is expected and it."""
        self._expected.append((at, request))
        self._forget()

    def _note(self, request: EngineRequest, at: float) -> None:
        n = request.sampling.n
        self._open[request.request_id] = Record(
            request.request_id, self.number, at, len(request.prompt_token_ids), num_open=n, num_sequences=n
        )

    @property
    def num_expected(self) -> int:
        """Who have not arrived yet."""
        return len(self._expected)

    def abort(self, request_id: int) -> None:
        self.core.abort(AbortRequests(request_ids=[request_id]))
        self._forget()

    def advance(self, until: float = math.inf) -> int | None:
        """Makes the steps that begin before that time; those arrive that are expected before it. Not so whoever would
        find an engine with nothing to do, for whom it stops: which request that is."""
        expected = self._expected
        while True:
            next_at = min(expected[0][0], until) if expected else until
            if self.core.has_work and self.clock.now() < next_at:
                self.make_next(until)
            elif expected and next_at < until:
                if not self._open and self.clock.now() < next_at:
                    return expected[0][1].request_id
                self.arrive()
            else:
                return None

    def arrive(self) -> None:
        """Whoever is expected first."""
        at, request = self._expected.popleft()
        self.add(request, at)

    def take_work(self) -> EngineWork:
        """What was done since the last call."""
        work, self.work = self.work, EngineWork()
        return work

    def next_moment(self) -> float:
        """No step begins before that of which somebody is told, unless somebody comes."""
        if not self.core.has_work:
            return math.inf
        ahead = self._foresee()
        return self.clock.now() if ahead is None else float(ahead.times[-2])

    def make_next(self, until: float = math.inf) -> None:
        """A step, or as many as can be foreseen and begin before that time."""
        ahead = self._foresee(until)
        if ahead is None and self._may_leap:
            ahead = self._decide(until)
        self._forget()
        if ahead is None:
            self._take(self.core.step())
            return
        rows = ahead.rows
        num_steps = 1 + int(ahead.times[1:-1].searchsorted(until))
        times = ahead.times[: num_steps + 1]
        steps = np.minimum(ahead.steps, num_steps)
        joins = ahead.joins
        for join in joins:
            self._expected.popleft()
            self._note(join.request, join.at)
        steps_of_joins = iter(joins)

        def on_start(decision: SchedulerOutput) -> None:
            own = [next(steps_of_joins).num_steps for _ in decision.rows]
            self._executor.start(decision, np.array(own))

        sample = self._executor.advance(rows, steps, times)
        held, outputs = self.core.advance(rows, steps, sample, joins, on_start)
        num_rows = self._take_many(ahead, steps, times)
        self._count_many(num_rows, times, held)
        self.work.num_tokens += ahead.num_more_tokens
        self._take_events(outputs, float(times[1]))

    def _forget(self) -> None:
        """What was foreseen has come, or will not."""
        self._foreseen = None
        self._has_looked = False

    def _foresee(self, until: float = math.inf) -> _Foreseen | None:
        """What begins before that time, at the least. Nothing, where the next step is not like those after it."""
        if not self._has_looked and self._may_leap:
            self._has_looked = True
            rows, steps = self.core.steady_horizon(beyond_ends=self._may_leap_beyond_ends)
            if len(rows):
                sequence_ids = self.core.scheduler.rows.sequence_id[rows].tolist()
                if self._tell is not None and not self._begun.keys() >= set(sequence_ids):
                    steps = np.minimum(steps, 1)  # a first token is told of when it comes
                self._foreseen = self._foreseen_from(rows, steps, sequence_ids, until)
        return self._foreseen

    def _decide(self, until: float) -> _Foreseen | None:
        """The next step is decided, and is the first of those. Nothing: it is made alone."""
        begun = self.core.begin_leap(beyond_ends=self._may_leap_beyond_ends)
        if begun is None:
            return None
        decision, steps = begun
        if self._tell is not None:
            steps = np.minimum(steps, 1)
        work = self._executor.begin_leap(decision)
        sequence_ids = self.core.scheduler.rows.sequence_id[decision.rows].tolist()
        return self._foreseen_from(decision.rows, steps, sequence_ids, until, work)

    def _foreseen_from(
        self, rows: IntArray, steps: IntArray, sequence_ids: list[int], until: float, work: StepWork | None = None
    ) -> _Foreseen:
        arrivals = [arrival for arrival in self._expected if arrival[0] < until]
        room = self.core.room_in_leap(rows) if arrivals else None
        times, joins = self._executor.foresee(rows, steps, until, work, arrivals, room)
        # of each step each row's token is counted
        num_more = work.num_tokens - len(rows) if work is not None else 0
        num_more += sum(len(join.request.prompt_token_ids) - (join.step - join.begins + 1) for join in joins)
        return _Foreseen(rows, steps, sequence_ids, times, num_more, joins)

    def statistics(self) -> dict[str, float]:
        return self.core.statistics()

    # ------------------------------------------------------------------------------------------ what comes back

    def _take(self, outputs: EngineOutputs) -> None:
        now = self.clock.now()
        gaps: list[float] = []
        for sequence_id in outputs.sequence_ids.tolist():
            self._add_tokens(sequence_id, 1, now, now, gaps)
        self.work.gaps.add(gaps)
        self._take_events(outputs)

    def _take_events(self, outputs: EngineOutputs, first: float | None = None) -> None:
        """`first`: many steps were made, of which the first was done then: who has ended did so with its last token, or
        in that step if it had none."""
        now = self.clock.now()
        for start in outputs.starts:
            request_id, index = split_sequence_id(start.sequence_id)
            if not index:
                self._open[request_id].num_cached_tokens = start.num_cached_tokens
        for end in outputs.ends:
            begun = self._begun.pop(end.sequence_id, None)
            at = now if first is None else first if begun is None else begun.last_token_at
            self._end(end.sequence_id, end.error, at)
        if self._tell is not None and (outputs.starts or outputs.ends or self._first_tokens):
            self._tell(now, self._first_tokens, self._ended, list(self._changes))
            self._first_tokens, self._ended = [], []
            self._changes.clear()

    def _take_many(self, ahead: _Foreseen, steps: IntArray, times: Floats) -> IntArray:
        """Each of its rows got a token in so many steps, and each that joined. Of each step, how many rows it had."""
        gaps: list[float] = []
        first = float(times[1])
        for sequence_id, count, last in zip(ahead.sequence_ids, steps.tolist(), times[steps].tolist(), strict=True):
            self._add_tokens(sequence_id, count, first, last, gaps)
        num_steps = len(times) - 1
        num_gone = np.bincount(steps, minlength=num_steps + 1)
        # rows that begin in a step, and those that had no token before it
        num_come = np.zeros(num_steps + 1, dtype=np.int64)
        num_new = np.zeros(num_steps + 1, dtype=np.int64)
        for join in ahead.joins:
            last_step = join.step + join.num_steps
            sequence_id = sequence_id_of(join.request.request_id, 0)
            self._add_tokens(sequence_id, join.num_steps, float(times[join.step + 1]), float(times[last_step]), gaps)
            num_come[join.begins] += 1
            num_new[join.begins : join.step + 1] += 1
            num_gone[last_step] += 1
        num_rows: IntArray = len(steps) + (num_come - num_gone)[:-1].cumsum()
        self.work.gaps.add(gaps)
        self.work.gaps.add_many(times[2:] - times[1:-1], (num_rows - num_new[:-1])[1:])
        return num_rows

    def _add_tokens(self, sequence_id: int, count: int, first: float, last: float, gaps: list[float]) -> None:
        """So many for this sequence, from the first one to the last. `gaps`: how long it has waited for the first, if
        it had one before."""
        begun = self._begun.get(sequence_id)
        if begun is None:
            begun = self._begin(sequence_id, first)
            if begun is None:
                return
        else:
            gaps.append(first - begun.last_token_at)
        begun.last_token_at = last
        record = begun.record
        record.num_output_tokens += count
        if last > record.last_token_at:
            record.last_token_at = last

    def _begin(self, sequence_id: int, now: float) -> _Begun | None:
        """It has its first token. None: its request has ended."""
        record = self._open.get(split_sequence_id(sequence_id)[0])
        if record is None:
            return None
        if record.first_token_at < 0:
            record.first_token_at = now
            if self._tell is not None:
                self._first_tokens.append(record.number)
        begun = self._begun[sequence_id] = _Begun(record, now)
        return begun

    def _hear(self, change: CacheChanged) -> None:
        """What others can ask for of this is told."""
        change.stored = common_names(change.stored)
        change.removed = common_names(change.removed)
        if change.stored or change.removed or change.is_cleared:
            self._changes.append(change)

    def _end(self, sequence_id: int, error: str | None, now: float) -> None:
        request_id = split_sequence_id(sequence_id)[0]
        record = self._open[request_id]
        record.error = record.error or error or ""
        record.num_open -= 1
        if not record.num_open:
            record.ended_at = now
            del self._open[request_id]
            if self._tell is not None:
                self._ended.append(request_id)
            if self._may_hide and record.num_sequences == 1:
                num_tokens = record.num_prompt_tokens + record.num_output_tokens
                self._pool.hide(own_names(request_id, 0, num_tokens // self._block_size + 1))
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

    def _count_many(self, num_rows: IntArray, times: Floats, held: IntArray) -> None:
        """As `_count` would, step by step."""
        self._last_done_at = float(times[-1])
        num_steps = len(times) - 1
        num_tokens = int(num_rows.sum())
        did = self.work
        did.num_steps += num_steps
        did.num_tokens += num_tokens
        did.rows_by_step += num_tokens
        sums = np.empty((3, num_steps + 1))
        sums[:, 0] = did.busy_seconds, did.row_seconds, did.block_seconds
        seconds = np.subtract(times[1:], times[:-1], out=sums[0, 1:])
        np.multiply(num_rows, seconds, out=sums[1, 1:])
        np.multiply(held, seconds, out=sums[2, 1:])
        # one after the other, so that the bits are those of a loop
        sums = np.add.accumulate(sums, axis=1)
        did.busy_seconds, did.row_seconds, did.block_seconds = sums[:, -1].tolist()

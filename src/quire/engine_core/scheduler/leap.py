"""Many steps at once, where nothing but arithmetic happens: every running sequence gets one token a step.

A simulation spends nearly all of its steps so (simulation/). `horizon` says for how many steps from now on nobody can
start, give way or fork; who has all of its tokens ends on the way. `behind` says the same of a step that the scheduler
has just decided, with prompts in it, and those after it. `advance` makes them, and leaves everything as that many steps
would have left it, the order in which cached blocks are given up included. What is special in any way goes step by
step. Called by the scheduler.

Where nobody looks for blocks by their names, those may join who come meanwhile, and are certain to start with all of
their prompt in the next step (`Room`). The scheduler itself starts them, in the step that is theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.steady_growth import Growth
from quire.engine_core.request import Sequence as TokenSequence
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission import Admission
from quire.engine_core.scheduler.admission_control import AdmissionControl
from quire.engine_core.scheduler.constraints import Constraint
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.running import StepsInFlight
from quire.engine_core.scheduler.speculation import NoSpeculation, Speculation
from quire.engine_core.scheduler.transfers import Transfers
from quire.messages import NO_INTS, EngineRequest, IntArray
from quire.observability.recorder import Recorder

Flags = npt.NDArray[np.bool_]

# So far one looks ahead: more would be priced in vain, because somebody comes.
_FARTHEST = 512
# of those who start in one step
_MOST_JOINING = 4


class Join(Protocol):
    """Who starts in a later step of a leap, and gets a token in `step`, which is that or the next one, and in those
    after it, so many in all."""

    @property
    def begins(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def request(self) -> EngineRequest: ...
    @property
    def num_steps(self) -> int: ...


# The scheduler decides the step of that number, of this leap, in which these requests start: their sequences.
Start = Callable[[int, list[EngineRequest]], list[TokenSequence]]


@dataclass(slots=True)
class Room:
    """What is left for those who come during a leap, whoever ends meanwhile."""

    admission: Admission
    block_size: int
    num_tokens: int
    num_rows: int
    num_blocks: int
    # of the leap
    num_steps: int = _FARTHEST

    def take(self, requests: Sequence[EngineRequest], num_running: int) -> list[int]:
        """How many tokens each may get of these, who come together when so many run. Nothing, if it is not certain
        that all of them start, and with all of their prompts; one that comes alone, with as much as the step has."""
        most = []
        num_tokens = num_running
        for request in requests:
            length = self.admission.plain_length(request)
            num_prompt = len(request.prompt_token_ids)
            num_tokens += num_prompt
            self.num_rows -= 1
            self.num_blocks -= -(-min(length, num_prompt + self.num_steps) // self.block_size) + 1
            if not length:
                return []
            most.append(length - num_prompt)
        # a prompt alone may take two steps, in each of which those who run get a token
        num_steps = 2 if len(requests) == 1 else 1
        num_left = num_steps * (self.num_tokens - num_running) - (num_tokens - num_running)
        is_certain = min(self.num_rows, self.num_blocks, num_left) >= 0
        return most if is_certain and len(requests) <= _MOST_JOINING else []


class Leap:
    """Reads what a step would look at; changes what a step of one token for everybody changes."""

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        lifecycle: Lifecycle,
        admission_control: AdmissionControl,
        speculation: Speculation,
        in_flight: StepsInFlight,
        constraints: tuple[Constraint, ...],
        transfers: Transfers,
        admission: Admission,
        max_num_batched_tokens: int,
    ) -> None:
        self._admission = admission
        self._steady = manager.steady
        self._pool = manager.pool
        self._rows = rows
        self._cache = manager.cache
        self._moves = manager.moves
        self._lifecycle = lifecycle
        self._queues = lifecycle.queues
        self._shares = lifecycle.queues.shares
        self._running = lifecycle.running
        self._admission_control = admission_control
        self._in_flight = in_flight
        self._constraints = constraints
        self._transfers = transfers
        self._max_num_batched_tokens = max_num_batched_tokens
        # recorded decisions are those of steps, and drafts make steps uneven
        is_seen = type(manager.pool.recorder) is not Recorder
        self.is_possible = not is_seen and isinstance(speculation, NoSpeculation)

    def horizon(self, step: int, *, beyond_ends: bool) -> tuple[IntArray, IntArray]:
        """(rows, steps of each): each of these rows gets a token in so many steps from now on. `beyond_ends`: else the
        first step that ends somebody is the last one. `step`: of those that were decided."""
        nothing = NO_INTS, NO_INTS
        if not self.is_possible or self._in_flight or self._has_news():
            return nothing
        rows = self._running.rows_in_order()
        num_steps = min(_FARTHEST, self._admission_control.num_steps_without_start(step))
        if not num_steps or not 0 < len(rows) <= self._max_num_batched_tokens:
            return nothing
        known = self._rows.num_known[rows]
        if not self.are_plain(rows, known):
            return nothing
        # whoever waits may start where somebody ends
        steps = self._steps(rows, known, num_steps, beyond_ends=beyond_ends and self._queues.are_empty)
        return (rows, steps) if len(steps) else nothing

    def behind(self, rows: IntArray, granted: IntArray, *, beyond_ends: bool) -> tuple[IntArray, IntArray]:
        """(rows, steps of each) from the step on that was just decided: it grants so many tokens to these rows, all
        that each of them has, and so each samples one."""
        nothing = NO_INTS, NO_INTS
        running = self._running.rows_in_order()
        if not self.is_possible or self._in_flight or not 0 < len(running) == len(rows) or self._moves_contents():
            return nothing
        known = self._rows.num_known[running]
        if not self._nobody_looks(running, known, self._rows.num_computed[running] + granted[running] == known):
            return nothing
        num_steps = _FARTHEST if self._queues.are_empty else 1
        steps = self._steps(running, known, num_steps, beyond_ends=beyond_ends)
        return (running, steps) if len(steps) else nothing

    def _steps(self, rows: IntArray, known: IntArray, most: int, *, beyond_ends: bool) -> IntArray:
        """Of at most so many, those in which each of these rows gets a token. Nothing, if blocks are special."""
        steps = self._rows.max_total[rows] - known
        fewest = int(steps.min())
        if fewest <= 0:
            return NO_INTS
        steps = np.minimum(steps, most if beyond_ends else min(most, fewest))
        return self._steady.steps_with_blocks(rows, self._running.sequences_at(rows), steps)

    def room(self, rows: IntArray) -> Room | None:
        """For those who come while these rows, which `horizon` or `behind` has named, get their tokens."""
        is_plain = (
            self._steady.is_simple and not self._pool.keeps_contents and self._queues.are_empty
            and not self._lifecycle.open_inputs and not self._admission_control.is_anybody_protected
            and type(self._transfers) is Transfers
        )  # fmt: skip
        if not is_plain:
            return None
        size = self._steady.block_size
        return Room(
            self._admission,
            size,
            self._max_num_batched_tokens,
            self._rows.num_free - self._running.num_reserved_rows,
            # those that are decided count on a block for each row
            self._pool.num_free - len(rows) * (_FARTHEST // size + 1) - self._rows.num_rows,
        )

    def advance(
        self,
        rows: IntArray,
        steps: IntArray,
        sample: Callable[[], IntArray],
        joins: Sequence[Join],
        start: Start,
    ) -> IntArray:
        """`sample`: what the steps sample, of one row after the other; not asked if nothing depends on it. `joins`: by
        step. Blocks that are held in each step."""
        sequences = self._running.sequences_at(rows)
        num_steps = max(int(steps.max()), *(join.step + join.num_steps for join in joins), 0)
        num_held = self._pool.num_held
        # more than before, by step
        taken = np.zeros(num_steps + 1, dtype=np.int64)
        are_named = not all(sequence.is_unnamed for sequence in sequences)
        self._rows.learn_many(rows, steps, sample() if are_named else None)
        growth = self._steady.growth(rows, sequences, steps)
        taken[: len(growth.taken)] += growth.taken
        left = self._rows.max_total[rows] - self._rows.num_known[rows]
        # (step, row, whose): those of one step come in the order of their rows, as results do it
        ends = [(int(steps[i]), int(rows[i]), sequences[i]) for i in (left <= 0).nonzero()[0].tolist()]
        heapify(ends)
        joining = deque(joins)
        # who has computed a part of its prompt
        cut: list[tuple[TokenSequence, Join]] = []
        num_made = 0
        while ends or joining or cut:
            num_made = min(ends[0][0] if ends else num_steps, joining[0].begins if joining else num_steps)
            if cut:
                num_made = cut[0][1].step
            self._made(growth, num_made)
            held_before = self._pool.num_held
            while ends and ends[0][0] == num_made:
                sequence = heappop(ends)[2]
                with self._lifecycle.blaming(sequence.request, "it could not be ended"):
                    self._lifecycle.end_output(sequence, "length")
            self._lifecycle.end_blamed()
            started = []
            if joining and joining[0].begins == num_made:
                of_step = [joining.popleft()]
                while joining and joining[0].begins == num_made:
                    of_step.append(joining.popleft())
                started = list(zip(start(num_made, [join.request for join in of_step]), of_step, strict=True))
            elif cut:
                # nobody starts beside it
                self._steady.allocate_rest(cut[0][0])
                started = cut
            taken[num_made] += self._pool.num_held - held_before
            cut = [one for one in started if one[1].step > num_made]
            if not cut:
                self._join_all(started, ends, taken)
        if num_made < num_steps:
            self._made(growth, num_steps)
        held: IntArray = num_held + taken[:num_steps].cumsum()
        return held

    def _join_all(
        self,
        joined: list[tuple[TokenSequence, Join]],
        ends: list[tuple[int, int, TokenSequence]],
        taken: IntArray,
    ) -> None:
        """These compute the last of their prompts: their numbers and blocks become those behind their steps. `ends`:
        gets those who end with the last of them; `taken`: blocks by step."""
        numbers = self._rows
        for sequence, join in joined:
            row = sequence.row
            numbers.learn_unseen(row, join.num_steps)
            steps = self._steady.grow(row, sequence, join.num_steps)
            taken[join.step + steps.start : join.step + steps.stop : steps.step] += 1
            if numbers.num_known[row] >= numbers.max_total[row]:
                heappush(ends, (join.step + join.num_steps, row, sequence))

    def _made(self, growth: Growth, num_steps: int) -> None:
        """So many steps are made, but for who ends in the last."""
        growth.make(num_steps)
        self._in_flight.settled_at = self._rows.num_changes
        if growth.are_named:
            self._cache.step_decided()
            self._cache.step_settled()

    def _has_news(self) -> bool:
        """Somebody must hear of something with the next step, or has forked in the last."""
        changes, events = self._lifecycle.changes, self._lifecycle.events
        return bool(
            changes.forked or changes.admitted or changes.progress or changes.appended or changes.masked
            or events or self._moves.are_pending
        )  # fmt: skip

    def _moves_contents(self) -> bool:
        """The step that was just decided forks, or moves more than entries of block tables."""
        changes = self._lifecycle.changes
        return bool(changes.forked or changes.progress or changes.appended or changes.masked) or (
            self._moves.are_contents_pending or self._transfers.are_pending
        )

    def are_plain(self, rows: IntArray, known: IntArray) -> bool:
        """One token to compute, nobody looks at it before it is sampled, no token ends a sequence, no limit applies."""
        computed = self._rows.num_computed[rows]
        is_next = (known - computed == 1) & (computed > 0)
        return self._nobody_looks(rows, known, is_next)

    def _nobody_looks(self, rows: IntArray, known: IntArray, is_next: Flags) -> bool:
        """At what these rows sample if that is what they compute."""
        numbers = self._rows
        is_so = is_next & (numbers.num_total[rows] == known) & numbers.is_plain[rows]
        # counted, which takes a fraction of what `all` and `any` do with so few
        return (
            np.count_nonzero(is_so) == len(rows)
            and not self._shares.are_several
            and not numbers.saved
            and not any(constraint.limits(numbers) for constraint in self._constraints)
        )

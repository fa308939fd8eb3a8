"""Many steps at once, where nothing but arithmetic happens: every running sequence gets one token a step.

A simulation spends nearly all of its steps so (simulation/). `horizon` says for how many steps from now on nobody can
start, give way or fork; who has all of its tokens ends on the way. `behind` says the same of a step that the scheduler
has just decided, with prompts in it, and those after it. `advance` makes them, and leaves everything as that many steps
would have left it, the order in which cached blocks are given up included. What is special in any way goes step by
step. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.steady_growth import Growth
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission_control import AdmissionControl
from quire.engine_core.scheduler.constraints import Constraint
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.running import StepsInFlight
from quire.engine_core.scheduler.speculation import NoSpeculation, Speculation
from quire.engine_core.scheduler.transfers import Transfers
from quire.messages import NO_INTS, IntArray
from quire.observability.recorder import Recorder

Flags = npt.NDArray[np.bool_]

# So far one looks ahead: more would be priced in vain, because somebody comes.
_FARTHEST = 512


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
        max_num_batched_tokens: int,
    ) -> None:
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
        steps = self._steps(rows, known, num_steps, beyond_ends=beyond_ends and not len(self._queues))
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
        num_steps = 1 if len(self._queues) else _FARTHEST
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

    def advance(self, rows: IntArray, steps: IntArray, sample: Callable[[], IntArray]) -> IntArray:
        """`sample`: what the steps sample, of one row after the other; not asked if nothing depends on it. Blocks that
        are held in each step."""
        sequences = self._running.sequences_at(rows)
        are_named = not all(sequence.is_unnamed for sequence in sequences)
        self._rows.learn_many(rows, steps, sample() if are_named else None)
        growth = self._steady.growth(rows, sequences, steps)
        held = growth.held
        left = self._rows.max_total[rows] - self._rows.num_known[rows]
        # those of one step in the order of their rows, as results do it
        ends = sorted((int(steps[i]), int(rows[i]), sequences[i]) for i in (left <= 0).nonzero()[0].tolist())
        for num_steps, of_step in groupby(ends, key=itemgetter(0)):
            self._made(growth, num_steps)
            num_held = self._pool.num_held
            for _, _, sequence in of_step:
                with self._lifecycle.blaming(sequence.request, "it could not be ended"):
                    self._lifecycle.end_output(sequence, "length")
            self._lifecycle.end_blamed()
            held[num_steps:] -= num_held - self._pool.num_held
        if not ends or ends[-1][0] < len(held):
            self._made(growth, len(held))
        return held

    def _made(self, growth: Growth, num_steps: int) -> None:
        """So many steps are made, but for who ends in the last."""
        growth.make(num_steps)
        self._in_flight.settled_at = self._rows.num_changes
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

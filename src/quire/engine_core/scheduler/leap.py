"""Many steps at once, where nothing but arithmetic happens: every running sequence gets one token a step.

A simulation spends nearly all of its steps so (simulation/). `horizon` says for how many steps from now on nobody can
start, give way or fork, and nobody ends before the last of them; `advance` makes them, and leaves everything as that
many steps would have left it, the order in which cached blocks are given up included. What is special in any way goes
step by step. Called by the core.
"""

from __future__ import annotations

import numpy as np

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission_control import AdmissionControl
from quire.engine_core.scheduler.constraints import Constraint
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.running import StepsInFlight
from quire.engine_core.scheduler.speculation import NoSpeculation, Speculation
from quire.messages import NO_INTS, IntArray
from quire.observability.recorder import Recorder

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
        max_num_batched_tokens: int,
    ) -> None:
        self._steady = manager.steady
        self._rows = rows
        self._cache = manager.cache
        self._moves = manager.moves
        self._lifecycle = lifecycle
        self._shares = lifecycle.queues.shares
        self._running = lifecycle.running
        self._admission_control = admission_control
        self._in_flight = in_flight
        self._constraints = constraints
        self._max_num_batched_tokens = max_num_batched_tokens
        # recorded decisions are those of steps, and drafts make steps uneven
        is_seen = type(manager.pool.recorder) is not Recorder
        self._is_possible = not is_seen and isinstance(speculation, NoSpeculation)

    def horizon(self, step: int) -> tuple[IntArray, int]:
        """(rows, steps): these rows get a token each in every one of so many steps. `step`: of those that were
        decided."""
        nothing = NO_INTS, 0
        if not self._is_possible or self._in_flight or self._has_news():
            return nothing
        rows = self._running.rows_in_order()
        num_steps = min(_FARTHEST, self._admission_control.num_steps_without_start(step))
        if not num_steps or not 0 < len(rows) <= self._max_num_batched_tokens:
            return nothing
        known = self._rows.num_known[rows]
        if not self._are_plain(rows, known):
            return nothing
        # the last of them may end somebody
        num_steps = min(num_steps, int((self._rows.max_total[rows] - known).min()))
        if num_steps > 0:
            num_steps = self._steady.num_steps_with_blocks(rows, self._running.sequences_at(rows), num_steps)
        return (rows, num_steps) if num_steps > 0 else nothing

    def advance(self, rows: IntArray, token_ids: IntArray) -> IntArray:
        """`token_ids`: of each row those that the steps sample, [rows, steps]. Blocks that are held after each step,
        before anybody ends."""
        num_steps = token_ids.shape[1]
        self._rows.learn_many(rows, token_ids)
        held = self._steady.advance(rows, self._running.sequences_at(rows), num_steps)
        self._in_flight.settled_at = self._rows.num_changes
        self._cache.step_decided()
        self._cache.step_settled()
        ended = rows[self._rows.num_known[rows] >= self._rows.max_total[rows]]
        for sequence in self._running.sequences_at(np.sort(ended)):
            with self._lifecycle.blaming(sequence.request, "it could not be ended"):
                self._lifecycle.end_output(sequence, "length")
        self._lifecycle.end_blamed()
        return held

    def _has_news(self) -> bool:
        """Somebody must hear of something with the next step, or has forked in the last."""
        changes, events = self._lifecycle.changes, self._lifecycle.events
        return bool(
            changes.forked or changes.admitted or changes.progress or changes.appended or changes.masked
            or events or self._moves.are_pending
        )  # fmt: skip

    def _are_plain(self, rows: IntArray, known: IntArray) -> bool:
        """One token to compute, nobody looks at it before it is sampled, no token ends a sequence, no limit applies."""
        numbers = self._rows
        computed = numbers.num_computed[rows]
        # counted, which takes a fraction of what `all` and `any` do with so few
        return bool(
            not np.count_nonzero(known - computed != 1)
            and not np.count_nonzero(numbers.num_total[rows] != known)
            and np.count_nonzero(computed) == len(rows)
            and np.count_nonzero(numbers.runs_on[rows]) == len(rows)
            and not np.count_nonzero(numbers.stop_ids[rows] >= 0)
            and not np.count_nonzero(numbers.tenant[rows])
            and not self._shares.are_several
            and not numbers.saved
            and not any(constraint.limits(numbers) for constraint in self._constraints)
        )

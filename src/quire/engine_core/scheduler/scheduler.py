"""The scheduler (4.2.2, 4.4, 4.5): grants tokens to sequences, and knows no phases.

A step grants a sequence 0 < n <= num_total_tokens - num_computed_tokens; everything of table 4.1 is nothing but values
of these two numbers. It asks the KV cache manager for blocks and the policy for an order and a victim, leaves the life
of requests to Lifecycle, who may start to AdmissionControl, and what comes back to Results. Called by EngineCore
alone; never touches a clock, a socket or a tensor.

Numbers in parentheses, here and everywhere, are sections of the thesis "vLLM" (2025); its algorithms go by number, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request
from quire.engine_core.request import Sequence as TokenSequence
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission import Admission
from quire.engine_core.scheduler.admission_control import AdmissionControl
from quire.engine_core.scheduler.constraints import (
    CheckpointBoundaries,
    Constraint,
    ModelLength,
    Permits,
    RowLimit,
    Uncut,
)
from quire.engine_core.scheduler.first_tokens import FirstTokens
from quire.engine_core.scheduler.leap import Join, Leap, Room
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.prerequisites import Prerequisite, Prerequisites
from quire.engine_core.scheduler.recovery import Recovery
from quire.engine_core.scheduler.results import Results
from quire.engine_core.scheduler.running import StepInFlight, StepsInFlight
from quire.engine_core.scheduler.speculation import NoSpeculation, Speculation
from quire.engine_core.scheduler.step_budget import StepBudget
from quire.engine_core.scheduler.transfers import Transfers
from quire.kv_connectors.connector import NoSchedulerHalf
from quire.messages import (
    EngineOutputs,
    EngineRequest,
    IntArray,
    PermitTokens,
    SchedulerOutput,
    StepOutput,
    int_array,
)

logger = logging.getLogger("quire.scheduler")


class Scheduler:
    """add_request, schedule, update_from_output; extend and abort in between.

    `schedule` may be called once more before the results of the last step are there (4.6.1), and more often where a
    constraint keeps each row out of all but one of these steps.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        policy: SchedulingPolicy,
        recovery: Recovery,
        *,
        budget: StepBudget,
        max_model_len: int,
        vocab_size: int,
        speculation: Speculation | None = None,
        transfers: Transfers | None = None,
        constraints: Sequence[Constraint] = (),
        prerequisites: Sequence[Prerequisite] = (),
        sees_all: bool = False,
        most_tokens: int = 1,
    ) -> None:
        """`prerequisites`: what a request may wait for, beside blocks that come from elsewhere. `sees_all`: the tokens
        of a prompt see each other, so that it is computed in one step. `most_tokens`: that a row may get in a
        step, if the worker finds time for them."""
        self.manager = manager
        self.rows = rows
        self.policy = policy
        self.recovery = recovery
        self.speculation = speculation or NoSpeculation()
        self._transfers = transfers or Transfers(NoSchedulerHalf(), manager.block_size)
        self.prerequisites = Prerequisites((*prerequisites, self._transfers))
        self.budget = budget
        uncut = Uncut(self.max_num_batched_tokens)
        self.most_tokens = most_tokens
        self._constraints = (Permits(), *constraints, *_boundaries(manager), uncut)
        # what a sequence may reach beyond what it surely has, in the estimates of its blocks
        reach = self.max_num_batched_tokens + manager.num_uncertain + manager.lookahead
        always = (ModelLength(max_model_len), RowLimit(rows.num_rows), uncut)
        self._steady = manager.steady
        self._cache = manager.cache
        self._pool = manager.pool
        self._moves = manager.moves
        self._admission = Admission(
            manager, (*always, *constraints), self.prerequisites, reach, max_model_len, vocab_size, sees_all
        )
        self._in_flight = StepsInFlight()
        self._first_tokens = FirstTokens(rows)
        self.lifecycle = Lifecycle(
            manager,
            rows,
            self._admission,
            self.speculation,
            self._in_flight,
            self.prerequisites,
            self._first_tokens,
        )
        self.running = self.lifecycle.running
        self.queues = self.lifecycle.queues
        self._shares = self.queues.shares
        self.recorder = self._pool.recorder
        self._results = Results(manager, rows, self.lifecycle, self.speculation, self._in_flight, self._first_tokens)
        # tokens granted in the step that is being decided, by row
        self._granted = np.zeros(rows.num_rows, dtype=np.int64)
        # of that step
        self._num_budgeted = self.max_num_batched_tokens
        # in it somebody waits for the next token of an answer, and there is a target of time between them
        self._is_held_to_target = False
        # for how many of its budget a token of each row counts
        self._weights = np.ones(rows.num_rows)
        self.admission_control = AdmissionControl(
            manager, rows, policy, recovery, self.lifecycle, self._transfers, reach, self._granted
        )
        self.recorder.attach(rows.sequence_id, self.admission_control.counts)
        self._leap = Leap(
            manager,
            rows,
            self.lifecycle,
            self.admission_control,
            self.speculation,
            self._in_flight,
            self._constraints,
            self._transfers,
            self._admission,
            self.max_num_batched_tokens,
        )
        # Somebody gave way for a block in the last round of grants. Nobody starts then: what became free is for those
        # who run.
        self._gave_way = False
        # in the step that is being decided those who run were granted a token each, and no blocks
        self._are_plain = False
        # of a step that was decided, and that `schedule` is still to tell of
        self._rows_decided: IntArray | None = None
        self._num_steps = 0

    @property
    def max_num_batched_tokens(self) -> int:
        return self.budget.max_num_tokens

    def add_request(self, message: EngineRequest) -> None:
        self.lifecycle.add(message)

    def extend(self, request_id: int, token_ids: list[int], is_final: bool) -> None:
        self.lifecycle.extend(request_id, token_ids, is_final)

    def permit(self, permit: PermitTokens) -> None:
        self.lifecycle.permit(permit)

    def abort(self, request_ids: Iterable[int], sequence_ids: Iterable[int] = ()) -> None:
        self.lifecycle.abort(request_ids, sequence_ids)

    def fail(self, request_id: int, reason: str, num_outputs: int) -> None:
        self.lifecycle.fail(request_id, reason, num_outputs)

    def take_doubt(self) -> bool:
        """Whether a request has failed, since the last call, so that more may be wrong."""
        return self.lifecycle.take_doubt()

    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()

    def forget_computed(self, weights_version: bytes) -> int:
        """Nothing that was computed so far is read again, because the weights are others: requests that run compute
        their tokens anew, and blocks have other names. How many requests that are."""
        running = list(self.running.requests)
        for request in running:
            self.admission_control.preempt(request, "the weights have changed", is_void=True)
        for request in self.queues.all_preempted():
            if request.is_swapped:
                self.admission_control.displace(request)
        for request in self.lifecycle.requests.values():
            for sequence in request.sequences.values():
                self._cache.forget_names(sequence)
        self.manager.rename_blocks(weights_version)
        return len(running)

    def pin(self, handle: str, num_tokens: int) -> dict[str, Any]:
        """A kept sequence becomes a pinned prefix, if every request that was accepted can still run."""
        requests = self.lifecycle.requests
        largest = max(map(self._admission.most_blocks, requests.values()), default=1)
        kept = self.manager.kept
        return kept.pin(handle, num_tokens, most_blocks=self._pool.num_blocks - len(kept.pinned_blocks) - largest)

    # ------------------------------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput | None:
        """Decides a step; None: nobody has anything to compute."""
        rows = self._decide() if self._rows_decided is None else self._rows_decided
        self._rows_decided = None
        return self._message_of(rows, self._granted[rows]) if len(rows) else None

    def _decide(self, *, may_leap: bool = False) -> IntArray:
        """Repeats while nothing was granted and either a request ended or room was made for a stuck one. That comes to
        an end: each round has fewer requests, or fewer that hold what a stuck one could have."""
        while True:
            num_requests = len(self.lifecycle.requests)
            rows = self._grant(may_leap=may_leap)
            if len(rows):
                return rows
            if len(self.lifecycle.requests) == num_requests and not self.admission_control.make_room_for_stuck():
                return rows

    def _grant(self, *, may_leap: bool) -> IntArray:
        """The budget goes to those who run and those who wait, in the policy's order. The rows that got some.
        `may_leap`, in simulations (leap.py): where it is certain that those who run get a token each, and their blocks,
        they get the tokens."""
        self.lifecycle.line_up_ready()
        self._granted[:] = 0
        self.admission_control.begin_step(self._num_steps, has_results_to_come=bool(self._in_flight))
        self._are_plain = may_leap and self._grant_plainly()
        while not self._are_plain and self._grant_running() and not self._granted.any():
            pass  # the budget was meant for somebody who gave way; every round there is one less
        # if somebody gave way for a block in the last round, others got tokens in it, and nobody starts
        if not self._gave_way:
            self._admit(self._num_budgeted - math.ceil(self._granted @ self._weights))
        granted: IntArray = self._granted.nonzero()[0]
        return granted

    def wait_for_prerequisites(self) -> bool:
        """Nothing is to be done: a few milliseconds, for what comes from elsewhere. False: nobody waits for that."""
        return self.prerequisites.wait()

    def steady_horizon(self, *, beyond_ends: bool) -> tuple[IntArray, IntArray]:
        """(rows, steps of each): each of these rows gets one token in so many steps, and nothing else happens but that
        they end; `beyond_ends`: not only in the last step."""
        return self._leap.horizon(self._num_steps, beyond_ends=beyond_ends)

    def begin_leap(self, *, beyond_ends: bool) -> tuple[SchedulerOutput, IntArray] | None:
        """Decides a step. If all that it grants is sampled from, and steps of one token may follow: what the workers
        hear of it, and in how many steps each of its rows gets a token. None: `schedule`, which must come next, says
        what was decided."""
        decided = self._decide(may_leap=True)
        rows, steps = self._leap.behind(decided, self._granted, beyond_ends=beyond_ends and not self._gave_way)
        if not len(rows):
            if self._are_plain:
                self._take_for_running(self.running.rows_in_order())
            self._rows_decided = decided
            return None
        return self._message_in_leap(rows), steps

    def _message_in_leap(self, rows: IntArray) -> SchedulerOutput:
        """What the workers hear of the step that was just decided, and of these rows; its results are there."""
        num_tokens = self._granted[rows]
        changes = self.lifecycle.take_changes()
        decision = SchedulerOutput(
            step=self._num_steps + 1,
            released=list(changes.released),
            admitted=changes.admitted,
            rows=rows,
            num_tokens=num_tokens,
        )
        self.manager.take_moves_into(decision)
        self.manager.step_settled()
        self._first_tokens.all_come()
        return decision

    def room_in_leap(self, rows: IntArray) -> Room | None:
        """For those who come while these rows get their tokens, from the next step or the decided one on; None: who
        comes ends that."""
        return None if self.budget.seconds else self._leap.room(rows)

    def advance(
        self,
        rows: IntArray,
        steps: IntArray,
        sample: Callable[[], IntArray],
        joins: Sequence[Join],
        on_start: Callable[[SchedulerOutput], None],
    ) -> IntArray:
        """So many of these steps. Blocks that are held in each of them; events tell who ended, in order. `on_start`:
        hears what was decided of those who join."""
        first = self._num_steps
        held = self._leap.advance(rows, steps, sample, joins, partial(self._start_in_leap, on_start, first))
        self._num_steps = first + len(held)
        return held

    def _start_in_leap(
        self, on_start: Callable[[SchedulerOutput], None], first: int, number: int, requests: list[EngineRequest]
    ) -> list[TokenSequence]:
        """Decides the step of that number behind the first, in which these join: their sequences. Each is granted its
        whole prompt, but one that comes alone may get a part of it."""
        for request in requests:
            self.lifecycle.add(request)
        self._num_steps = first + number
        self._decide(may_leap=True)
        assert self._are_plain, "those who run were certain to get their tokens"
        started = [self.lifecycle.requests[request.request_id].sequences[0] for request in requests]
        decision = self._message_in_leap(int_array([sequence.row for sequence in started]))
        prompts = [sequence.num_total_tokens for sequence in started]
        num_tokens = decision.num_tokens.tolist()
        if prompts != num_tokens:
            is_cut = len(started) == 1 and int(self._granted.sum()) == self.max_num_batched_tokens
            assert is_cut, "who joins was certain to start with its whole prompt"
            self.rows.begin_at(started[0].row, num_tokens[0])
        on_start(decision)
        return started

    @property
    def work_in_flight(self) -> int:
        """Of the steps that were decided and have no results yet, in tokens."""
        return sum(step.work for step in self._in_flight)

    def update_from_output(self, output: StepOutput) -> EngineOutputs:
        """The results of the earliest step that has none yet."""
        return self._results.settle(output)

    def take_events(self, outputs: EngineOutputs) -> None:
        """What became of requests without a step: refused, aborted."""
        self._results.take_events(outputs)

    def _message_of(self, rows: IntArray, num_tokens: IntArray) -> SchedulerOutput:
        """What the workers hear of the decision.

        4.6.1: the numbers follow from the decision alone, not from what will be sampled.
        """
        num_granted = int(num_tokens.sum())
        work = self._work_of(rows, num_tokens, num_granted)
        num_decided = self._first_tokens.decided(num_granted)
        self.rows.grant(rows, num_tokens)
        if self._shares.are_several:
            self._shares.charge(self.rows.tenant[rows], num_tokens)
        growth = self.rows.promise(rows, self.speculation.num_drafts(rows, self.rows.num_total[rows]))
        self._num_steps += 1
        self._in_flight.append(
            StepInFlight(self._num_steps, rows, num_tokens, growth, self.rows.num_changes, work, num_decided)
        )
        changes = self.lifecycle.take_changes()
        decision = SchedulerOutput(
            step=self._num_steps,
            forked=changes.forked,
            released=list(changes.released),
            admitted=changes.admitted,
            progress=list(changes.progress.items()),
            appended=[entry for entries in changes.appended.values() for entry in entries],
            masked=changes.masked,
            rows=rows,
            num_tokens=num_tokens,
            most_tokens=self.most_tokens if self._may_go_on(rows, growth) else 1,
            step_data={**self.speculation.step_data(growth), **self._transfers.step_data()},
        )
        self.manager.take_moves_into(decision)
        self.recorder.decided(decision)
        return decision

    def _may_go_on(self, rows: IntArray, growth: IntArray) -> bool:
        """Whether these rows may get several tokens in the step: each of them grows by the one that it samples."""
        if self.most_tokens == 1 or self.rows.with_permits or np.count_nonzero(growth) < len(rows):
            return False
        return not self.has_others(rows)

    def has_others(self, rows: IntArray) -> bool:
        """Whether somebody is there besides these rows, who would wait for a longer step."""
        is_waiting = len(self.running.requests) < len(self.lifecycle.requests)
        return is_waiting or len(rows) < len(self.running.rows_in_order())

    def _work_of(self, rows: IntArray, num_tokens: IntArray, num_granted: int) -> int:
        """What a step computes, in tokens with which a prompt begins: for who judges how long it may take. One of next
        tokens alone is short, wherever they stand."""
        work = num_granted
        if num_granted > len(rows):
            work = math.ceil(num_tokens @ self.budget.weights(self.rows.num_computed[rows]))
        return work + self.rows.num_image_tokens(rows, num_tokens)

    # ------------------------------------------------------------------------------------------ granting

    def _grant_running(self) -> bool:
        """Whether somebody had to give way. Nothing has been granted before."""
        self._gave_way = False
        rows = self.running.rows_in_order()
        granted = self._within_limits(rows, self.rows.remaining(rows))
        self._num_budgeted = self.max_num_batched_tokens
        counted = self._keep_to_target(rows, granted) if self.budget.seconds else granted
        if counted.sum() > self._num_budgeted:
            shares = self._share_out(rows, granted)
            granted = self._within_limits(rows, shares)
            self._save_up(rows, shares)
        self._granted[rows] = granted
        self._take_for_running(rows)
        return self._gave_way

    def _keep_to_target(self, rows: IntArray, wanted: IntArray) -> npt.NDArray[np.float64]:
        """Sets the budget for the sake of those who stream, and for how many of it a token counts. For how many these
        tokens do, row by row."""
        is_behind = self._are_behind(rows, wanted)
        num_streaming = self._num_streaming(rows, wanted, is_behind)
        self._is_held_to_target = num_streaming > 0
        self._num_budgeted = self.budget.tokens(num_streaming)
        self._weights[:] = 1.0
        self._weigh(rows[is_behind])
        counted: npt.NDArray[np.float64] = wanted * self._weights[rows]
        return counted

    def _weigh(self, rows: IntArray) -> None:
        """These compute more than the next token of an answer, from where they stand."""
        if self._is_held_to_target:
            self._weights[rows] = self.budget.weights(self.rows.num_computed[rows])

    def _affordable(self, row: int, budget: int) -> int:
        """Tokens of a row that starts where it stands now, for so many of the budget. Even if that is none,
        `_most` gives it what it needs to get on by."""
        self._weigh(int_array([row]))
        return int(budget / self._weights[row])

    def _grant_plainly(self) -> bool:
        """Each row that runs gets its next token, if nobody else could be in question for it, or for its block."""
        rows = self.running.rows_in_order()
        num_free = self._pool.num_free - len(rows)
        is_short = self.budget.seconds or len(rows) >= self.max_num_batched_tokens
        if is_short or self.manager.keeps_contents or not self.admission_control.has_blocks_for_all(num_free):
            return False
        if not self._leap.is_possible or not self._leap.are_plain(rows, self.rows.num_known[rows]):
            return False
        self._gave_way = False
        self._num_budgeted = self.max_num_batched_tokens
        self._granted[rows] = 1
        return True

    def _take_for_running(self, rows: IntArray) -> None:
        """Blocks for what these rows were granted, and names for those that it fills."""
        granted = self._granted[rows]
        computed = self.rows.num_computed[rows]
        if np.count_nonzero(computed) < len(rows):
            self._take_turns(rows[computed == 0])
            granted = self._granted[rows]
        reached = computed + granted
        needs_block = rows[(reached > self.rows.writable_until[rows]) & (granted > 0)]
        special = self._after_steady_ones(needs_block, self._steady.allocate)
        for sequence in special:
            if self._granted[sequence.row]:  # it may have been preempted meanwhile
                self._make_room(sequence)
        self._cache.settle()
        if special:
            # those that have just begun did so behind what they found
            granted = self._granted[rows]
            reached = self.rows.num_computed[rows] + granted
        ends = self.rows.next_name_at(rows, self.manager.block_size)
        fills_block = rows[(np.minimum(reached, self.rows.num_known[rows]) >= ends) & (granted > 0)]
        for sequence in self._after_steady_ones(fills_block, self._steady.name):
            try:
                if self._granted[sequence.row]:  # none any more if a sibling has failed
                    self._name_granted(sequence)
            except Exception as error:
                self._fail(sequence.request, error)

    def _are_behind(self, rows: IntArray, wanted: IntArray) -> npt.NDArray[np.bool_]:
        """All that they want is known, and more than the next token is missing."""
        are_behind: npt.NDArray[np.bool_] = (self.rows.num_known[rows] == self.rows.num_total[rows]) & (wanted > 1)
        return are_behind

    def _num_streaming(self, rows: IntArray, granted: IntArray, is_behind: npt.NDArray[np.bool_]) -> int:
        """Next tokens of answers that are under way, in this step or right behind it."""
        num_now = int(granted[~is_behind].sum())
        if not self._in_flight:
            return num_now
        # those whose next token is to be computed as soon as a step in flight has brought the last one: that comes
        # behind this step, so it is short for their sake, too
        rows = rows[(granted == 0) & self.rows.are_in_flight(rows)]
        num_left = self.rows.remaining(rows)
        stopped = self.running.sequences_at(rows[(num_left == 0) & ~self.rows.runs_on[rows]])
        num_chosen_for = sum(sequence.request.shape.num_candidates > 0 for sequence in stopped)
        return num_now + int((num_left == 1).sum()) + num_chosen_for

    def _after_steady_ones(
        self, rows: IntArray, steady_way: Callable[[IntArray, list[TokenSequence]], bool]
    ) -> list[TokenSequence]:
        """Rows that were granted one token go the short way, all at once; the sequences that need the long one."""
        if not len(rows):
            return []
        is_steady = self._granted[rows] == 1
        num_steady = np.count_nonzero(is_steady)
        if num_steady == len(rows):
            sequences = self.running.sequences_at(rows)
            return [] if steady_way(rows, sequences) else sequences
        if num_steady and steady_way(rows[is_steady], self.running.sequences_at(rows[is_steady])):
            rows = rows[~is_steady]
        return self.running.sequences_at(rows)

    def _share_out(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """The budget is short: the policy's order, with room for those who wait and go before some who run."""
        keys = self.policy.key(self.rows.priority[rows], wanted)
        is_behind = self._are_behind(rows, wanted)
        weights = self._weights[rows]
        num_shared = self._num_budgeted
        if self._is_held_to_target:
            num_shared -= int(wanted[~is_behind].sum())
        promised = self._promised_to_earliest(rows, is_behind, wanted, num_shared)
        if self._is_held_to_target:
            promised = _with_streaming(promised, wanted, is_behind, self.max_num_batched_tokens)
        num_promised = math.ceil(promised @ weights)
        budget = self._num_budgeted - num_promised - self._set_aside((wanted - promised) * weights, keys, num_promised)
        return promised + _by_keys(wanted - promised, keys, budget, weights)

    def _promised_to_earliest(
        self, rows: IntArray, is_behind: npt.NDArray[np.bool_], wanted: IntArray, num_shared: int
    ) -> IntArray:
        """The rule of progress: a share of these tokens for the first of those that are behind, and no less than it can
        get on by.

        The rows stand by arrival, so it is the earliest. Without it, a long prompt that has started
        may never get on while shorter ones keep coming (4.5.3 bounds only the wait to the first chunk).
        """
        share = self.policy.progress_share
        if share == 0 or not is_behind.any():
            return self._promised_to_saver(rows, wanted)
        promised = np.zeros(len(wanted), dtype=np.int64)
        first = int(is_behind.argmax())
        least = self.rows.least(int(rows[first]))
        promised[first] = min(int(wanted[first]), max(least, int(share * num_shared / self._weights[rows[first]])))
        return promised

    def _promised_to_saver(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """A range of tokens that see each other, for the first row that has saved as many as it takes: what it was left
        by several steps, and could not use, it gets in one. So it waits no longer than if it could be cut."""
        promised = np.zeros(len(wanted), dtype=np.int64)
        for index, row in enumerate(rows.tolist() if self.rows.saved else ()):
            if (needed := self.rows.spend(row)) > 0:
                promised[index] = min(int(wanted[index]), needed)
                break
        return promised

    def _save_up(self, rows: IntArray, shares: IntArray) -> None:
        """For the rows whose share of this step ends within the range that it begins with."""
        if self.rows.whole_ranges:
            for row, share in zip(rows.tolist(), shares.tolist(), strict=True):
                self.rows.save(row, share)

    def _set_aside(self, missing: npt.NDArray[np.float64], keys: IntArray, num_promised: int) -> int:
        """Budget for waiting requests that go before some of those that run. `missing`: what rows count for beside what
        is promised."""
        taken = 0
        for request in self.admission_control.waiting():
            num_remaining = self.admission_control.num_remaining(request)
            num_ahead = int(missing[keys <= self.policy.key(request.priority, num_remaining)].sum())
            left = self._num_budgeted - num_promised - num_ahead - taken
            ranges = request.whole_ranges
            least = 1 if ranges is None else ranges.length_at(request.longest - num_remaining)
            if left < least or not self.admission_control.may_start(request):
                break
            taken += min(num_remaining, left)
        return taken

    def _take_turns(self, rows: IntArray) -> None:
        """A sequence that holds nothing yet begins behind what its sibling computes first: until then that sibling gets
        its tokens, too. The last ones come first, so that tokens are handed on to the front."""
        for sequence in reversed(self.running.sequences_at(rows)):
            num_tokens = int(self._granted[sequence.row])
            if sequence.is_begun or not num_tokens:
                continue
            if (awaited := _awaited_sibling(sequence, self.manager, self._granted)) is not None:
                self._granted[sequence.row] = 0
                self._granted[awaited.row] = self._most(awaited, int(self._granted[awaited.row]) + num_tokens)

    def _make_room(self, sequence: TokenSequence) -> None:
        """Blocks for a running sequence; if there are none, others give way until there are, or it gives way itself.

        Before anybody gives way the manager has used what nobody holds, and what kept sequences offer.
        """
        while not self._has_blocks_or_failed(sequence):
            victim = self._victim()
            self._preempt(victim, f"request {sequence.request.request_id} needs a block and none is free")
            if victim is sequence.request:
                return

    def _has_blocks_or_failed(self, sequence: TokenSequence) -> bool:
        """Takes its blocks. False: there is no room for them, and nothing has changed."""
        try:
            return self._take_blocks(sequence)
        except Exception as error:
            self._fail(sequence.request, error)
            return True

    def _fail(self, request: Request, error: Exception) -> None:
        """What was decided for the others stands."""
        logger.error("request %d failed while it was scheduled", request.request_id, exc_info=error)
        self._granted[[sequence.row for sequence in request.sequences.values() if sequence.row >= 0]] = 0
        self.lifecycle.fail(request.request_id, f"it could not be scheduled ({type(error).__name__}).")

    def _take_blocks(self, sequence: TokenSequence) -> bool:
        if sequence.is_begun:
            return self.manager.allocate_slots(sequence, int(self._granted[sequence.row]))
        # What its siblings were granted before it, it need not compute again.
        for sibling in sequence.request.sequences.values():
            if sibling is sequence:
                break
            if sibling.is_begun and self._granted[sibling.row]:
                self._name_granted(sibling, is_promise=True)
        return self._begin(sequence, int(self._granted[sequence.row]))

    def _begin(self, sequence: TokenSequence, budget: int) -> bool:
        """The first tokens of a sequence that holds nothing: behind the longest prefix at hand, and what is fetched."""
        computed = self.manager.get_computed_blocks(sequence)
        has_transfer = self._transfers.concerns(sequence.request)
        num_fetched = self._transfers.begin(sequence, computed.num_tokens) if has_transfer else 0
        num_computed = computed.num_tokens + num_fetched
        if num_fetched:
            computed = self.manager.before_fetched(computed, num_computed)
        self.rows.begin_at(sequence.row, num_computed, computed.num_without_state)  # limits ask for it
        num_tokens = self._most(sequence, self._affordable(sequence.row, budget))
        if not num_tokens:
            self.rows.save(sequence.row, budget)
        if not num_tokens or not self.manager.allocate_slots(sequence, num_fetched + num_tokens, computed):
            self.rows.begin_at(sequence.row, 0)
            return not num_tokens  # a limit grants nothing: it begins later, and nobody need make room
        if num_fetched:
            self._moves.fetch(sequence)
        if sequence.num_lost_tokens:
            self.recovery.begun(sequence, num_computed)
        self.recorder.found(sequence.sequence_id, computed.num_tokens, num_fetched, sequence.num_total_tokens)
        self.lifecycle.set_progress(sequence, num_computed)
        self._granted[sequence.row] = num_tokens
        return True

    def _name_granted(self, sequence: TokenSequence, *, is_promise: bool = False) -> None:
        num_computed = sequence.num_computed_tokens + int(self._granted[sequence.row])
        self.manager.name_granted(sequence, num_computed, is_promise=is_promise)

    # ------------------------------------------------------------------------------------------ preemption (3.4.5)

    def _victim(self) -> Request:
        """Whom to preempt: the policy's choice among those that run and did not come back a moment ago. Who only waits
        for input goes before all others."""
        running = self.running.requests
        candidates = [request for request in running if self.recovery.may_be_victim(request)]
        idle = [request for request in candidates if request.waits_for_input]
        if not candidates:
            # All came back a moment ago. Admission set aside what they need, so this is not expected. Somebody must get
            # on, so one of them gives way all the same.
            self.recovery.num_broken_protections += 1
        return self.policy.victim(idle or candidates or running)

    def _preempt(self, request: Request, reason: str) -> None:
        """All or nothing, all sequences of a request."""
        self._gave_way = True
        for sequence in request.sequences.values():
            self._granted[sequence.row] = 0
        self.admission_control.preempt(request, reason)

    # ------------------------------------------------------------------------------------------ admission

    def _admit(self, budget: int) -> None:
        while budget > 0:
            request = self.admission_control.next()
            if request is None:
                return
            self.queues.remove(request)
            try:
                budget = self._start(request, budget)
            except Exception as error:
                self._fail(request, error)

    def _start(self, request: Request, budget: int) -> int:
        """Grants what the budget has for it; returns what is left."""
        how = "new" if not request.was_started else "swap" if request.is_swapped else "again"
        if how == "swap":
            self.recovery.bring_back(request)
        self.recorder.started(request.request_id, how, len(request.sequences))
        if request.was_started:
            self.recovery.protect(request)
        if len(request.sequences) > 1:
            with self.manager.holding_prefixes(request):
                budget = self._start_sequences(request, budget)
            self._cache.settle()
        else:
            budget = self._start_sequences(request, budget)
        if request.sequences:
            self.running.join(request)
        return budget

    def _start_sequences(self, request: Request, budget: int) -> int:
        has_siblings = len(request.sequences) > 1
        for sequence in request.sequences.values():
            self.lifecycle.place(sequence)
            is_begun = sequence.is_begun
            if has_siblings and not is_begun and _awaited_sibling(sequence, self.manager, self._granted) is not None:
                continue
            if is_begun:
                num_tokens = self._most(sequence, self._affordable(sequence.row, budget))
            else:  # limited when it is known where it begins
                num_tokens = min(sequence.num_total_tokens - sequence.num_computed_tokens, budget)
            self._granted[sequence.row] = num_tokens
            if num_tokens and not self._take_blocks(sequence):
                # Not expected: the estimate was too small. It ends this request, not the engine.
                self._granted[[one.row for one in request.sequences.values() if one.row >= 0]] = 0
                self.lifecycle.fail(request.request_id, "KV cache: more blocks are needed than were expected.")
                return budget
            num_tokens = int(self._granted[sequence.row])
            if num_tokens:
                self._name_granted(sequence)
            budget = max(0, budget - math.ceil(num_tokens * self._weights[sequence.row]))
        return budget

    def _most(self, sequence: TokenSequence, budget: int) -> int:
        """What it may have beside all that was granted in this step: no more than the budget, but what it needs to get
        on by, if so much is left. What was meant for it stood elsewhere, or comes in pieces from its siblings."""
        self._granted[sequence.row] = 0
        least = self.rows.least(sequence.row)
        if budget < least:
            left = self.max_num_batched_tokens - int(self._granted.sum())
            budget = max(budget, min(left, least))
        wanted = min(sequence.num_total_tokens - sequence.num_computed_tokens, budget)
        if not wanted or not self._limiting():
            return wanted
        others = np.flatnonzero(self._granted)
        rows = np.append(others, sequence.row)
        num_tokens = np.append(self._granted[others], wanted)
        return int(self._within_limits(rows, num_tokens)[-1])

    def _within_limits(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        for constraint in self._limiting():
            num_tokens = constraint.most(self.rows, rows, num_tokens)
        return num_tokens

    def _limiting(self) -> list[Constraint]:
        """Those that have something to say of these rows, in their order."""
        return [constraint for constraint in self._constraints if constraint.limits(self.rows)]

    # ------------------------------------------------------------------------------------------ what can be seen

    def statistics(self) -> dict[str, float]:
        account = self.memory()
        counts = self._results.counts
        return {
            "num_requests_running": len(self.running.requests),
            "num_requests_waiting": len(self.queues),
            "num_requests_preempted": self.queues.num_preempted,
            "num_requests_total": self.lifecycle.num_arrivals,
            "num_steps_total": self._num_steps,
            "num_dropped_tokens_total": self._results.num_dropped_tokens,
            "num_dropped_outputs_total": self._results.num_dropped_outputs,
            "num_failed_requests_total": self.lifecycle.num_failed,
            **{f"{name}_total": count for name, count in counts.items()},
            **self.manager.statistics(),
            **self.recovery.statistics(),
            **self.speculation.statistics(),
            **self._transfers.statistics(),
            **{f"kv_slots_{name}": count for name, count in account["slots"].items()},
            **{f"host_slots_{name}": count for name, count in account["host_slots"].items()},
            "num_blocks_saved_by_sharing": account["num_blocks_saved_by_sharing"],
        }

    def memory(self) -> dict[str, Any]:
        """Where every slot of the KV cache is."""
        return asdict(self.manager.account(self.running.living_sequences()))

    def check_invariants(self) -> None:
        self.rows.check_invariants()
        assert sum(self._granted.tolist()) <= self.max_num_batched_tokens, "a step was granted more than the budget"
        assert self._cache.num_steps_awaited == len(self._in_flight), "names are unsure too long or too short"
        self.manager.check_invariants(self.running.living_sequences())
        self.lifecycle.check_invariants()
        self.prerequisites.check_invariants()


def _boundaries(manager: KVCacheManager) -> tuple[Constraint, ...]:
    """Where a checkpoint of a state is to be left, a grant must end."""
    if manager.checkpoints is None:
        return ()
    return (CheckpointBoundaries(manager.block_size, manager.checkpoints.interval),)


# ---- sharing out a budget that is too small for all (4.5) ------------------------------------------------------------


def _with_streaming(promised: IntArray, wanted: IntArray, is_behind: npt.NDArray[np.bool_], most: int) -> IntArray:
    """All that those want who are not behind, unless that and what is promised are more than a step may have."""
    in_all: IntArray = np.where(is_behind, promised, wanted)
    return in_all if in_all.sum() <= most else promised


def _by_keys(wanted: IntArray, keys: IntArray, budget: int, weights: npt.NDArray[np.float64]) -> IntArray:
    """Each gets what those with smaller keys leave; of equal keys the earlier entry goes first. `weights`: for how many
    of the budget a token counts. Whatever others leave of it is enough for one token."""
    order = np.argsort(keys, kind="stable")
    wanted = wanted[order]
    weights = weights[order]
    counted = wanted * weights
    left = np.maximum(budget - (np.cumsum(counted) - counted), 0)
    granted = np.empty(len(wanted), dtype=np.int64)
    granted[order] = np.minimum(np.maximum(left // weights, left > 0), wanted)
    return granted


def _awaited_sibling(sequence: TokenSequence, manager: KVCacheManager, granted: IntArray) -> TokenSequence | None:
    """The earlier sequence of its request that has still to compute what this one, which holds nothing, is to find
    (3.4.5). Estimates count on that; else several would compute the same, each into blocks of its own. `granted` holds
    the tokens of this step by row."""
    awaited = None
    num_shared = 0
    num_there = 0
    for sibling in sequence.request.sequences.values():
        if sibling is sequence:
            break
        num_tokens = manager.estimates.num_shared(sequence, [sibling]) * manager.block_size
        reached = sibling.num_computed_tokens + int(granted[sibling.row])
        num_there = max(num_there, min(num_tokens, reached))
        if num_tokens > num_shared:
            awaited = sibling
            num_shared = num_tokens
    return awaited if num_there < num_shared else None

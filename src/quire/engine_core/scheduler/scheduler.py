"""The scheduler (4.2.2, 4.4, 4.5): grants tokens to sequences, and knows no phases.

A step grants a sequence 0 < n <= num_total_tokens - num_computed_tokens; prefill, decode, chunks, prefix hits,
preemption and streamed input are nothing but values of these two numbers. It asks the KV cache manager for blocks, the
policy for an order and a victim, and leaves the life of requests to Lifecycle. Called by EngineCore alone; never
touches a clock, a socket or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Sequence
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission import Admission
from quire.engine_core.scheduler.changes import ClientEvents, WorkerChanges
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.recovery import Recovery
from quire.messages import (
    EngineOutputs,
    EngineRequest,
    IntArray,
    SchedulerOutput,
    SequenceLogprobs,
    StepOutput,
    TokenLogprobs,
    int_array,
)

# steps after which a request that waits for blocks looks again what it finds computed
_LOOK_AGAIN_AFTER = 16


class Scheduler:
    """add_request, schedule, update_from_output; extend and abort in between."""

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        policy: SchedulingPolicy,
        recovery: Recovery,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.manager = manager
        self.rows = rows
        self.policy = policy
        self.recovery = recovery
        self.max_num_batched_tokens = max_num_batched_tokens
        self._admission = Admission(manager, rows, max_num_batched_tokens, max_model_len, vocab_size)
        self.lifecycle = Lifecycle(manager, rows, policy, self._admission)
        self.running = self.lifecycle.running
        self.queues = self.lifecycle.queues
        # tokens granted in the step that is being decided, by row
        self._granted = np.zeros(rows.num_rows, dtype=np.int64)
        self._gave_way = False
        self._num_steps = 0

    def add_request(self, message: EngineRequest) -> None:
        self.lifecycle.add(message)

    def extend(self, request_id: int, token_ids: list[int], is_final: bool) -> None:
        self.lifecycle.extend(request_id, token_ids, is_final)

    def abort(self, request_ids: Iterable[int], sequence_ids: Iterable[int] = ()) -> None:
        self.lifecycle.abort(request_ids, sequence_ids)

    def pin(self, handle: str, num_tokens: int) -> dict[str, Any]:
        """A kept sequence becomes a pinned prefix, if every request that was accepted can still run."""
        largest = max(map(self._admission.most_blocks, self.lifecycle.requests.values()), default=1)
        pool, kept = self.manager.pool, self.manager.kept
        return kept.pin(handle, num_tokens, most_blocks=pool.num_blocks - len(kept.pinned_blocks()) - largest)

    # ------------------------------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput | None:
        """Algorithm 1 in the policy's order: the budget goes to those who run, then to those who wait."""
        while self._grant_running() and not self._granted.any():
            pass  # the budget was meant for somebody who gave way; every round there is one less
        if not self._gave_way or not self._granted.any():
            self._admit(self.max_num_batched_tokens - int(self._granted.sum()))
        rows = np.flatnonzero(self._granted)
        if not len(rows):
            return self.schedule() if self._let_somebody_in() else None
        num_tokens = self._granted[rows]
        # 4.6.1: the numbers follow from the decision alone, not from what will be sampled
        self.rows.num_computed[rows] += num_tokens
        return self._output(rows, num_tokens)

    def update_from_output(self, output: StepOutput) -> EngineOutputs:
        """What was sampled: appended, shown to decoding methods, held against the stop rules."""
        rows, token_ids = output.rows, output.token_ids
        self.rows.append(rows, token_ids)
        result = EngineOutputs(
            step=output.step,
            sequence_ids=self.rows.sequence_id[rows],
            token_ids=token_ids,
            logprobs=self._by_sequence(output.logprobs),
            prompt_logprobs=self._by_sequence(output.prompt_logprobs),
        )
        if output.failures:
            # First, because a decoding method may give the row of one that ended to another one.
            self._end_failed(output.failures)
            is_there = np.array([self.running.find(row) is not None for row in rows.tolist()], dtype=np.bool_)
            rows, token_ids = rows[is_there], token_ids[is_there]
        # Looked up before a decoding method gives rows away.
        answers = self.lifecycle.answers_of(output.candidates)
        self.lifecycle.show_tokens(rows)
        self.lifecycle.show_candidates(answers)
        self._end_finished(rows, token_ids)
        self.lifecycle.end_blamed()
        self.take_events(result)
        return result

    def take_events(self, outputs: EngineOutputs) -> None:
        """Begins, chosen tokens and ends since the last call, put into a message to the client."""
        events, self.lifecycle.events = self.lifecycle.events, ClientEvents()
        outputs.starts, outputs.ends = events.starts, events.ends
        if events.tokens:
            sequence_ids, token_ids = int_array(events.tokens).T
            outputs.sequence_ids = np.concatenate([outputs.sequence_ids, sequence_ids])
            outputs.token_ids = np.concatenate([outputs.token_ids, token_ids])
            outputs.logprobs = [*outputs.logprobs, *events.logprobs]

    # ------------------------------------------------------------------------------------------ granting

    def _grant_running(self) -> bool:
        """Whether somebody had to give way."""
        self._gave_way = False
        self._granted[:] = 0
        rows = self.running.rows_in_order()
        remaining = self.rows.remaining(rows)
        # each gets what those before it leave of the budget
        before = np.cumsum(remaining) - remaining
        granted = np.minimum(np.maximum(self.max_num_batched_tokens - before, 0), remaining)
        self._granted[rows] = granted
        needs_blocks = self.rows.num_computed[rows] + granted > self.rows.writable_until[rows]
        for row in rows[needs_blocks & (granted > 0)]:
            if self._granted[row]:  # it may have been preempted meanwhile
                self._make_room(self.running.sequence_at(row))
        self.manager.cache.settle()
        reached = self.rows.num_computed[rows] + self._granted[rows]
        for row in rows[(self._granted[rows] > 0) & (reached >= self.rows.next_block_end[rows])]:
            self._name_granted(self.running.sequence_at(row))
        return self._gave_way

    def _make_room(self, sequence: Sequence) -> None:
        """Blocks for a running sequence; if there are none, others give way until there are, or it gives way itself."""
        while not self._has_blocks(sequence):
            victim = self._victim()
            self._preempt(victim, f"request {sequence.request.request_id} needs a block and none is free")
            if victim is sequence.request:
                return

    def _has_blocks(self, sequence: Sequence) -> bool:
        if sequence.is_begun:
            return self.manager.allocate_slots(sequence, int(self._granted[sequence.row]))
        # What its siblings were granted before it, it need not compute again.
        for sibling in sequence.request.sequences.values():
            if sibling.is_begun and self._granted[sibling.row]:
                self._name_granted(sibling, is_promise=True)
        return self._begin(sequence, int(self._granted[sequence.row]))

    def _begin(self, sequence: Sequence, budget: int) -> bool:
        """The first tokens of a sequence that holds nothing: behind the longest prefix at hand."""
        computed = self.manager.get_computed_blocks(sequence)
        num_tokens = min(sequence.num_total_tokens - computed.num_tokens, budget)
        if not self.manager.allocate_slots(sequence, num_tokens, computed):
            return False
        self.recovery.begun(sequence, computed)
        self.lifecycle.set_progress(sequence, computed.num_tokens)
        self._granted[sequence.row] = num_tokens
        return True

    def _name_granted(self, sequence: Sequence, *, is_promise: bool = False) -> None:
        num_computed = sequence.num_computed_tokens + int(self._granted[sequence.row])
        self.manager.name_granted(sequence, num_computed, is_promise=is_promise)

    # ------------------------------------------------------------------------------------------ preemption (3.4.5)

    def _victim(self) -> Request:
        """The policy's choice among those that may give way; who only waits for input goes first."""
        running = self.running.requests
        candidates = [request for request in running if self.recovery.may_be_victim(request)]
        idle = [request for request in candidates if request.is_idle]
        if not candidates:
            # Admission set aside what resumed requests need, so this is not expected; progress matters more.
            self.recovery.num_broken_protections += 1
        return self.policy.victim(idle or candidates or running)

    def _preempt(self, request: Request, reason: str) -> None:
        """All or nothing, all sequences of a request."""
        self._gave_way = True
        for sequence in request.sequences.values():
            self._granted[sequence.row] = 0
        self.recovery.give_up(request, reason)
        self.running.leave(request)
        self.queues.add_preempted(request)

    # ------------------------------------------------------------------------------------------ admission

    def _admit(self, budget: int) -> None:
        while budget > 0:
            heads = [next(self.policy.order(line), None) for line in self.queues.lines()]
            request = next((head for head in heads if head is not None and self._may_start(head)), None)
            if request is None:
                return
            self.queues.remove(request)
            budget = self._start(request, budget)

    def _may_start(self, request: Request) -> bool:
        """Its rows are free, and blocks for all its tokens: else it would be preempted half-way."""
        running, step_tokens = self.running.requests, self.max_num_batched_tokens
        if not request.was_started and request.num_rows > self.rows.num_free - self.running.num_reserved_rows:
            return False
        # One that was preempted must also get on by a block before it gives way again; alone it need not share.
        num_more = self.manager.block_size if request.was_started and running else 0
        if self._still_too_little(request):
            return False
        reserved = self.recovery.num_reserved_blocks(request, running, step_tokens)
        pool, kept = self.manager.pool, self.manager.kept
        # Each kept sequence that gives up its blocks changes what is at hand; what the request continues goes last.
        while True:
            needed = self.manager.estimates.blocks_to_come(request, step_tokens, num_more) + reserved
            if needed <= pool.num_available:
                return True
            can_be_had = pool.num_available + kept.num_blocks_to_give_up() >= needed
            if not can_be_had or not (kept.give_up_blocks(request.message.continues) or kept.give_up_blocks()):
                request.needed_blocks, request.look_again_at = needed, self._num_steps + _LOOK_AGAIN_AFTER
                return False

    def _still_too_little(self, request: Request) -> bool:
        """Looking a long prompt up in every step would cost more than the step."""
        is_recent = self._num_steps < request.look_again_at and bool(self._granted.any())
        return is_recent and self.manager.pool.num_available < request.needed_blocks

    def _let_somebody_in(self) -> bool:
        """Nothing was granted though somebody waits: whoever only waits for input gives way."""
        heads = [next(self.policy.order(line), None) for line in self.queues.lines()]
        stuck = next((head for head in heads if head is not None), None)
        if stuck is None:
            return False
        idle = [request for request in self.running.requests if request.is_idle]
        if idle:
            self._preempt(self.policy.victim(idle), f"it waits for input, and request {stuck.request_id} for room")
            return True
        needed = self.manager.estimates.blocks_to_come(stuck, self.max_num_batched_tokens)
        there = self.manager.pool.num_available + self.manager.kept.num_blocks_to_give_up()
        if self.running.requests or needed <= there:
            return False  # it waits for rows, say
        # Not expected: each was accepted as one that fits alone. It must not hang.
        self.lifecycle.end_request(stuck, "error", f"KV cache: {needed} more blocks are needed, {there} can be had.")
        return True

    def _start(self, request: Request, budget: int) -> int:
        """Grants what the budget has for it; returns what is left."""
        if request.is_swapped:
            self.recovery.bring_back(request)
        if request.was_started:
            self.recovery.protect(request)
        with self.manager.holding_prefixes(request):
            budget = self._start_sequences(request, budget)
        self.manager.cache.settle()
        if request.sequences:
            self.running.join(request)
        return budget

    def _start_sequences(self, request: Request, budget: int) -> int:
        for sequence in request.sequences.values():
            self.lifecycle.place(sequence)
            num_tokens = min(sequence.num_total_tokens - sequence.num_computed_tokens, budget)
            self._granted[sequence.row] = num_tokens
            if num_tokens and not self._has_blocks(sequence):
                # Not expected: the estimate was too small. It ends this request, not the engine.
                self._granted[[one.row for one in request.sequences.values() if one.row >= 0]] = 0
                self.lifecycle.end_request(request, "error", "KV cache: more blocks are needed than were expected.")
                return budget
            if self._granted[sequence.row]:
                self._name_granted(sequence)
            budget -= int(self._granted[sequence.row])
        return budget

    def _output(self, rows: IntArray, num_tokens: IntArray) -> SchedulerOutput:
        changes, self.lifecycle.changes = self.lifecycle.changes, WorkerChanges()
        moves = self.manager.take_moves()
        self._num_steps += 1
        return SchedulerOutput(
            step=self._num_steps,
            forked=changes.forked,
            released=list(changes.released),
            admitted=changes.admitted,
            progress=list(changes.progress.items()),
            appended=[entry for entries in changes.appended.values() for entry in entries],
            block_writes=moves.block_writes,
            swapped_out=moves.swapped_out,
            swapped_in=moves.swapped_in,
            block_copies=moves.block_copies,
            rows=rows,
            num_tokens=num_tokens,
        )

    # ------------------------------------------------------------------------------------------ after a step

    def _end_finished(self, rows: IntArray, token_ids: IntArray) -> None:
        """3.2.2: a sequence ends at a stop token or at its greatest length."""
        totals = self.rows.num_total[rows]
        is_stop = (self.rows.stop_ids[rows] == token_ids[:, None]).any(axis=1) & (totals >= self.rows.min_total[rows])
        is_length = totals >= self.rows.max_total[rows]
        for position in np.flatnonzero(is_stop | is_length):
            sequence = self.running.sequence_at(rows[position])
            token = int(token_ids[position])
            asked_for = token in sequence.request.asked_for_ids
            if is_stop[position]:
                self.lifecycle.end_output(sequence, "stop", stop_reason=token if asked_for else None)
            else:
                self.lifecycle.end_output(sequence, "length")

    def _end_failed(self, failures: dict[int, str]) -> None:
        """A failed row ends its request. What the row has cached may be what failed it, so it is forgotten."""
        for row, reason in failures.items():
            sequence = self.running.find(row)
            if sequence is not None:
                self.manager.forget(sequence)
                self.lifecycle.end_request(sequence.request, "error", reason)

    def _by_sequence(self, by_row: dict[int, list[TokenLogprobs]]) -> list[SequenceLogprobs]:
        return [SequenceLogprobs(int(self.rows.sequence_id[row]), entries) for row, entries in by_row.items()]

    # ------------------------------------------------------------------------------------------ what can be seen

    def statistics(self) -> dict[str, float]:
        account = self.memory()
        return {
            "num_requests_running": len(self.running.requests),
            "num_requests_waiting": len(self.queues),
            "num_requests_preempted": self.queues.num_preempted,
            "num_steps_total": self._num_steps,
            **self.manager.statistics(),
            **self.recovery.statistics(),
            **{f"kv_slots_{name}": count for name, count in account["slots"].items()},
            **{f"host_slots_{name}": count for name, count in account["host_slots"].items()},
            "num_blocks_saved_by_sharing": account["num_blocks_saved_by_sharing"],
        }

    def memory(self) -> dict[str, Any]:
        """Where every slot of the KV cache is."""
        return asdict(self.manager.account(self.running.living_sequences()))

    def check_invariants(self) -> None:
        self.rows.check_invariants()
        assert self._granted.sum() <= self.max_num_batched_tokens, "a step was granted more than the budget"
        self.manager.check_invariants(self.running.living_sequences())
        self.lifecycle.check_invariants()

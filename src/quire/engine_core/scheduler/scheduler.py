"""The scheduler (4.2.2, 4.4, 4.5): grants tokens to sequences, and knows no phases.

A step grants a sequence 0 < n <= num_total_tokens - num_computed_tokens; prefill, decode, chunks, prefix hits,
preemption and streamed input are nothing but values of these two numbers. It asks the KV cache manager for blocks, the
policy for an order and a victim, and leaves the life of requests to Lifecycle. Called by EngineCore alone; never
touches a clock, a socket or a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from quire.engine_core.kv_cache_manager.manager import ComputedBlocks, KVCacheManager
from quire.engine_core.request import Request, Sequence
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission import Admission
from quire.engine_core.scheduler.changes import ClientEvents, WorkerChanges
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.messages import (
    EngineOutputs,
    EngineRequest,
    IntArray,
    SchedulerOutput,
    SequenceLogprobs,
    StepOutput,
    TokenLogprobs,
)

logger = logging.getLogger("quire.scheduler")


class Scheduler:
    """add_request, schedule, update_from_output; extend and abort in between."""

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        policy: SchedulingPolicy,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.manager = manager
        self.rows = rows
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self._admission = Admission(manager, rows, max_num_batched_tokens, max_model_len, vocab_size)
        self.lifecycle = Lifecycle(manager, rows, policy, self._admission)
        self.running = self.lifecycle.running
        self.queues = self.lifecycle.queues
        self.num_preemptions = 0
        # tokens granted in the step that is being decided, by row
        self._granted = np.zeros(rows.num_rows, dtype=np.int64)
        # rows of the steps that were decided and have not come back, by step
        self._rows_in_flight: dict[int, IntArray] = {}
        self._num_steps = 0

    def add_request(self, message: EngineRequest) -> None:
        self.lifecycle.add(message)

    def extend(self, request_id: int, token_ids: list[int], is_final: bool) -> None:
        self.lifecycle.extend(request_id, token_ids, is_final)

    def abort(self, request_ids: Iterable[int], sequence_ids: Iterable[int] = ()) -> None:
        self.lifecycle.abort(request_ids, sequence_ids)

    # ------------------------------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput | None:
        """Algorithm 1 in the policy's order: the budget goes to those who run, then to those who wait."""
        self._granted[:] = 0
        self._grant_running()
        self._admit(self.max_num_batched_tokens - int(self._granted.sum()))
        rows = np.flatnonzero(self._granted)
        if not len(rows):
            return None
        num_tokens = self._granted[rows]
        # 4.6.1: the numbers follow from the decision alone, not from what will be sampled
        self.rows.num_computed[rows] += num_tokens
        return self._output(rows, num_tokens)

    def update_from_output(self, output: StepOutput) -> EngineOutputs:
        """What was sampled: appended, shown to decoding methods, held against the stop rules; full blocks cached."""
        rows, token_ids = output.rows, output.token_ids
        self.rows.append(rows, token_ids)
        self._cache_full_blocks(self._rows_in_flight.pop(output.step), output.failures)
        result = EngineOutputs(
            step=output.step,
            sequence_ids=self.rows.sequence_id[rows],
            token_ids=token_ids,
            logprobs=self._by_sequence(output.logprobs),
            prompt_logprobs=self._by_sequence(output.prompt_logprobs),
        )
        self.lifecycle.show_tokens(rows)
        self._end_finished(rows, token_ids)
        self._end_failed(output.failures)
        self.take_events(result)
        return result

    def take_events(self, outputs: EngineOutputs) -> None:
        """Begins and ends since the last call, put into a message to the client."""
        events, self.lifecycle.events = self.lifecycle.events, ClientEvents()
        outputs.starts, outputs.ends = events.starts, events.ends

    # ------------------------------------------------------------------------------------------ granting

    def _grant_running(self) -> None:
        rows = self.running.rows_in_order()
        remaining = self.rows.remaining(rows)
        # each gets what those before it leave of the budget
        before = np.cumsum(remaining) - remaining
        granted = np.clip(self.max_num_batched_tokens - before, 0, remaining)
        self._granted[rows] = granted
        needs_blocks = self.rows.num_computed[rows] + granted > self.rows.writable_until[rows]
        for row in rows[needs_blocks & (granted > 0)]:
            if self._granted[row]:  # it may have been preempted meanwhile
                self._make_room(self.running.sequence_at(row))

    def _make_room(self, sequence: Sequence) -> None:
        """Blocks for a running sequence; if there are none, others give way until there are, or it gives way itself."""
        while self.manager.allocate_slots(sequence, int(self._granted[sequence.row])) is None:
            victim = self.policy.victim(self.running.requests)
            self._preempt(victim)
            if victim is sequence.request:
                return

    def _preempt(self, request: Request) -> None:
        """3.4.5: all or nothing, all sequences of a request; 4.4.3: num_computed_tokens becomes 0, the total stays."""
        logger.debug(
            "preempted request %d (priority %d, arrival %d): no block was free",
            request.request_id,
            request.priority,
            request.arrival,
        )
        for sequence in request.sequences.values():
            self._granted[sequence.row] = 0
            self.manager.free(sequence)
            self.rows.num_computed[sequence.row] = 0
        self.num_preemptions += 1
        self.running.leave(request)
        self.queues.add_preempted(request)

    def _admit(self, budget: int) -> None:
        while budget > 0:
            request = next(self.policy.order(self.queues.candidates()), None)
            if request is None:
                return
            starts = self._admission.starts(request, budget, self.running.num_reserved_rows())
            if starts is None:
                return
            self.queues.remove(request)
            # All prefixes are held before anything is allocated: an allocation may evict what nobody holds.
            for sequence, computed, _ in starts:
                self.lifecycle.place(sequence)
                self._allocate_planned(sequence, 0, computed)
                self.lifecycle.set_progress(sequence, computed.num_tokens)
            for sequence, _, num_tokens in starts:
                self._allocate_planned(sequence, num_tokens)
                self._granted[sequence.row] = num_tokens
                budget -= num_tokens
            self.running.join(request)

    def _allocate_planned(self, sequence: Sequence, num_tokens: int, computed: ComputedBlocks | None = None) -> None:
        if self.manager.allocate_slots(sequence, num_tokens, computed) is None:
            raise AssertionError("admission planned blocks that the pool does not have")

    def _output(self, rows: IntArray, num_tokens: IntArray) -> SchedulerOutput:
        changes, self.lifecycle.changes = self.lifecycle.changes, WorkerChanges()
        block_writes, block_copies = self.manager.take_changes()
        self._num_steps += 1
        self._rows_in_flight[self._num_steps] = rows
        return SchedulerOutput(
            step=self._num_steps,
            forked=changes.forked,
            released=changes.released,
            admitted=changes.admitted,
            progress=changes.progress,
            appended=changes.appended,
            block_writes=block_writes,
            block_copies=block_copies,
            rows=rows,
            num_tokens=num_tokens,
        )

    # ------------------------------------------------------------------------------------------ after a step

    def _cache_full_blocks(self, rows: IntArray, failures: dict[int, str]) -> None:
        """Only what was computed well may be found again."""
        for row in rows[self.rows.num_computed[rows] >= self.rows.next_block_end[rows]]:
            if row not in failures:
                self.manager.cache_computed_blocks(self.running.sequence_at(row))

    def _end_finished(self, rows: IntArray, token_ids: IntArray) -> None:
        """3.2.2: a sequence ends at a stop token or at its greatest length."""
        totals = self.rows.num_total[rows]
        is_stop = (self.rows.stop_ids[rows] == token_ids[:, None]).any(axis=1) & (totals >= self.rows.min_total[rows])
        is_length = totals >= self.rows.max_total[rows]
        for position in np.flatnonzero(is_stop | is_length):
            sequence = self.running.sequence_at(rows[position])
            token = int(token_ids[position])
            asked_for = token in sequence.request.sampling.stop_token_ids
            if is_stop[position]:
                self.lifecycle.free(sequence, "stop", stop_reason=token if asked_for else None)
            else:
                self.lifecycle.free(sequence, "length")

    def _end_failed(self, failures: dict[int, str]) -> None:
        """A failed row ends its request. What the row has cached may be what failed it, so it is forgotten."""
        for row, reason in failures.items():
            sequence = self.running.find(row)
            if sequence is not None:
                self.manager.forget(sequence)
                self.lifecycle.end(sequence.request, "error", reason)

    def _by_sequence(self, by_row: dict[int, list[TokenLogprobs]]) -> list[SequenceLogprobs]:
        return [SequenceLogprobs(int(self.rows.sequence_id[row]), entries) for row, entries in by_row.items()]

    # ------------------------------------------------------------------------------------------ what can be seen

    def statistics(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self.running.requests),
            "num_requests_waiting": len(self.queues),
            "num_requests_preempted": self.queues.num_preempted,
            "num_preemptions_total": self.num_preemptions,
            "num_steps_total": self._num_steps,
            **self.manager.statistics(),
        }

    def check_invariants(self) -> None:
        self.rows.check_invariants()
        assert self._granted.sum() <= self.max_num_batched_tokens, "a step was granted more than the budget"
        self.manager.check_invariants(self.running.living_sequences())
        self.lifecycle.check_invariants()

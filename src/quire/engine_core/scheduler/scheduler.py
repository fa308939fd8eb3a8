"""The scheduler (4.2.2, 4.4, 4.5): grants tokens to sequences, and knows no phases.

Owns requests from arrival to end, their rows, and the queues. A step grants a sequence
0 < n <= num_total_tokens - num_computed_tokens; prefill, decode, chunks, prefix hits, preemption and streamed input are
nothing but values of these two numbers. It asks the KV cache manager for blocks, the policy for an order, and the
decoding methods what a token leads to. Called by EngineCore alone; never touches a clock, a socket or a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from quire.engine_core.decoding.method import DecodingMethod
from quire.engine_core.decoding.parallel_sampling import ParallelSampling
from quire.engine_core.kv_cache_manager.manager import ComputedBlocks, KVCacheManager
from quire.engine_core.request import Request, Sequence, Status
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission import Admission
from quire.engine_core.scheduler.changes import ClientEvents, WorkerChanges
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.queues import WaitingQueues
from quire.engine_core.scheduler.running import Running
from quire.messages import (
    AppendedTokens,
    EngineOutputs,
    EngineRequest,
    ForkedSequence,
    IntArray,
    SchedulerOutput,
    SequenceEnd,
    SequenceLogprobs,
    StepOutput,
    sequence_id_of,
    split_sequence_id,
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
    ) -> None:
        self.manager = manager
        self.rows = rows
        self.policy = policy
        self.running = Running(rows, policy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.queues = WaitingQueues()
        self.requests: dict[int, Request] = {}
        self.num_preemptions = 0
        self._admission = Admission(manager, rows, max_num_batched_tokens, max_model_len)
        self._parallel_sampling: DecodingMethod = ParallelSampling()
        self._granted = np.zeros(rows.num_rows, dtype=np.int64)
        self._changes = WorkerChanges()
        self._events = ClientEvents()
        self._num_arrivals = 0
        self._num_steps = 0

    # ------------------------------------------------------------------------------------------ requests come and go

    def add_request(self, message: EngineRequest) -> None:
        """A request that can never run ends at once, with the reason; the others do not notice."""
        if message.request_id in self.requests:
            return  # a client that repeats an id gets the outputs of the first
        request = Request(message, self._num_arrivals, len(self.manager.groups))
        self._num_arrivals += 1
        refusal = self._admission.reason_to_refuse(request)
        self.requests[request.request_id] = request
        self.queues.add(request)
        if refusal is not None:
            self._end_request(request, "error", refusal)

    def extend(self, request_id: int, token_ids: list[int], is_final: bool) -> None:
        """Streaming prefill (4.4.4): the total grows as input arrives."""
        request = self.requests.get(request_id)
        if request is None or request.is_final:
            return
        request.num_prompt_tokens += len(token_ids)
        refusal = self._admission.reason_to_refuse(request)
        if refusal is not None:
            self._end_request(request, "error", refusal)
            return
        (sequence,) = request.sequences.values()
        request.is_final = is_final
        sequence.extend_prompt(np.asarray(token_ids, dtype=np.int32))
        if sequence.row >= 0:
            self._set_limits(sequence)
            self._changes.appended.append(AppendedTokens(row=sequence.row, token_ids=token_ids, is_final=is_final))
            if is_final and sequence.num_computed_tokens == sequence.num_total_tokens:
                # Everything is computed, but nothing was sampled: compute the last token once more.
                self._set_progress(sequence, sequence.num_total_tokens - 1)

    def abort(self, request_ids: Iterable[int], sequence_ids: Iterable[int] = ()) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self._end_request(self.requests[request_id], "abort")
        for sequence_id in sequence_ids:
            request_id, index = split_sequence_id(sequence_id)
            request = self.requests.get(request_id)
            if request is not None and index in request.sequences:
                self.free(request.sequences[index], "abort")

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
        self._cache_full_blocks()
        result = EngineOutputs(
            step=output.step,
            sequence_ids=self.rows.sequence_id[rows],
            token_ids=token_ids,
            logprobs=[SequenceLogprobs(self._id_of(row), entries) for row, entries in output.logprobs.items()],
            prompt_logprobs=[
                SequenceLogprobs(self._id_of(row), entries) for row, entries in output.prompt_logprobs.items()
            ],
        )
        self._show_to_decoding_methods(rows[self.rows.is_watched[rows]])
        self._end_finished(rows, token_ids)
        for row, reason in output.failures.items():
            sequence = self.running.find(row)
            if sequence is not None:
                self._end_request(sequence.request, "error", reason)
        self.take_events(result)
        return result

    def take_events(self, outputs: EngineOutputs) -> None:
        """Begins and ends since the last call, put into a message to the client."""
        outputs.starts, outputs.ends = self._events.starts, self._events.ends
        self._events = ClientEvents()

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
        """3.4.5: all or nothing, the whole group; recovery by recomputation. 4.4.3: num_computed_tokens becomes 0."""
        logger.debug(
            "preempted request %d (arrival %d): no free block for an earlier one", request.request_id, request.arrival
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
            plan = self._admission.plan(request, budget, self.running.num_reserved_rows())
            if plan is None:
                return
            self.queues.remove(request)
            # All prefixes are held before anything is allocated: an allocation may evict what nobody holds.
            for sequence, computed, _ in plan:
                self._start(sequence)
                self._allocate_planned(sequence, 0, computed)
                self._set_progress(sequence, computed.num_tokens)
            for sequence, _, num_tokens in plan:
                self._allocate_planned(sequence, num_tokens)
                self._granted[sequence.row] = num_tokens
                budget -= num_tokens
            self.running.join(request)

    def _allocate_planned(self, sequence: Sequence, num_tokens: int, computed: ComputedBlocks | None = None) -> None:
        if self.manager.allocate_slots(sequence, num_tokens, computed) is None:
            raise AssertionError("admission planned blocks that the pool does not have")

    # ------------------------------------------------------------------------------------------ verbs (3.5.2)

    def fork(self, parent: Sequence, index: int, num_total_tokens: int) -> Sequence:
        """A child of the same request: shares blocks, gets a row and a seed of its own."""
        request = parent.request
        tokens = parent.token_ids(0, num_total_tokens).copy()
        child = Sequence(request, index, tokens, request.seed_of(index), len(self.manager.groups))
        request.num_reserved_rows -= 1
        request.sequences[index] = child
        self._place(child)
        self.rows.is_watched[child.row] = False
        self.rows.num_computed[child.row] = num_total_tokens - 1
        self.manager.fork(parent, child)
        self._changes.forked.append(
            ForkedSequence(
                parent_row=parent.row,
                row=child.row,
                sequence_id=child.sequence_id,
                num_total_tokens=num_total_tokens,
                num_computed_tokens=num_total_tokens - 1,
                seed=child.seed,
            )
        )
        return child

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Tokens that a decoding method chose."""
        sequence.extend_prompt(np.asarray(token_ids, dtype=np.int32))
        self._changes.appended.append(AppendedTokens(row=sequence.row, token_ids=token_ids))

    def free(
        self, sequence: Sequence, finish_reason: str, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        """The sequence ends, and its request with the last one."""
        request = sequence.request
        del request.sequences[sequence.index]
        if sequence.row >= 0:
            self.manager.free(sequence)
            self.running.remove(sequence)
            self._changes.release(sequence.row)
        self._events.ends.append(SequenceEnd(sequence.sequence_id, finish_reason, stop_reason, error))
        if not request.sequences:
            self._forget(request)

    # ------------------------------------------------------------------------------------------ after a step

    def _cache_full_blocks(self) -> None:
        rows = np.flatnonzero(self._granted)
        for row in rows[self.rows.num_computed[rows] >= self.rows.next_block_end[rows]]:
            self.manager.cache_computed_blocks(self.running.sequence_at(row))

    def _show_to_decoding_methods(self, rows: IntArray) -> None:
        for row in rows:
            self.rows.is_watched[row] = self._parallel_sampling.after_token(self.running.sequence_at(row), self)

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
                self.free(sequence, "stop", stop_reason=token if asked_for else None)
            else:
                self.free(sequence, "length")

    def _end_request(self, request: Request, finish_reason: str, error: str | None = None) -> None:
        n = request.sampling.n
        never_forked = range(n - request.num_reserved_rows, n)
        for sequence in list(request.sequences.values()):
            self.free(sequence, finish_reason, error=error)
        for index in never_forked:
            self._events.ends.append(SequenceEnd(sequence_id_of(request.request_id, index), finish_reason, None, error))

    def _forget(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self.running.leave(request)
        self.queues.remove(request)
        request.status = Status.ENDED
        del self.requests[request.request_id]

    # ------------------------------------------------------------------------------------------ rows and running

    def _start(self, sequence: Sequence) -> None:
        """The first step of a sequence gives it its row; a resumed one has kept it."""
        if sequence.row < 0:
            self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        row = self.running.place(sequence)
        self.rows.next_block_end[row] = self.manager.block_size
        self.rows.set_stop_ids(row, sequence.request.stop_ids)
        self._set_limits(sequence)

    def _set_limits(self, sequence: Sequence) -> None:
        request, row = sequence.request, sequence.row
        self.rows.num_prompt[row] = request.num_prompt_tokens
        self.rows.max_total[row] = request.max_total_tokens(self.max_model_len)
        self.rows.min_total[row] = request.num_prompt_tokens + request.sampling.min_tokens
        self.rows.is_final[row] = request.is_final
        self.rows.is_watched[row] = request.num_reserved_rows > 0

    def _set_progress(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Both sides take the same number: the worker learns it as an admission or as progress."""
        row = sequence.row
        self.rows.num_computed[row] = num_computed_tokens
        if sequence.request.was_started or sequence.request.status is Status.RUNNING:
            self._changes.progress.append((row, num_computed_tokens))
        else:
            self._changes.admitted.append(self._admission.message(sequence, num_computed_tokens))
            self._events.starts.append(self._admission.start_event(sequence, num_computed_tokens))

    def _id_of(self, row: int) -> int:
        return int(self.rows.sequence_id[row])

    def _output(self, rows: IntArray, num_tokens: IntArray) -> SchedulerOutput:
        changes, self._changes = self._changes, WorkerChanges()
        block_writes, block_copies = self.manager.take_changes()
        self._num_steps += 1
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
        sequences = self.running.living_sequences()
        self.manager.check_invariants(sequences)
        for sequence in sequences:
            request = sequence.request
            assert request.sequences.get(sequence.index) is sequence
            if request.status is not Status.RUNNING:
                # 3.4.5: all or nothing
                assert not any(sequence.block_tables), "a preempted sequence holds blocks"
        assert {request.request_id for request in self.running.requests} == {
            request.request_id for request in self.requests.values() if request.status is Status.RUNNING
        }
        assert len(self.running.requests) + len(self.queues) == len(self.requests), (
            "a request is in no queue, or in two"
        )

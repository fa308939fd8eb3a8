"""The life of requests: they arrive, get rows, fork, grow, and end, each sequence exactly once.

Owns the requests, the queues, who runs, and what worker and client must hear of it. It decides nothing about a step:
that is the scheduler's. Decoding methods reach it through two of the three verbs of 3.5.2, fork and free; the third,
append, is what the worker does with every sampled token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from quire.engine_core.decoding import method_of
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Sequence, Status
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.admission import Admission
from quire.engine_core.scheduler.changes import ClientEvents, WorkerChanges
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.queues import WaitingQueues
from quire.engine_core.scheduler.running import Running
from quire.messages import (
    AppendedTokens,
    EngineRequest,
    ForkedSequence,
    IntArray,
    SequenceEnd,
    sequence_id_of,
    split_sequence_id,
)


class Lifecycle:
    """Requests by id, from arrival to end."""

    def __init__(self, manager: KVCacheManager, rows: Rows, policy: SchedulingPolicy, admission: Admission) -> None:
        self.requests: dict[int, Request] = {}
        self.queues = WaitingQueues()
        self.running = Running(rows, policy)
        self.changes = WorkerChanges()
        self.events = ClientEvents()
        self._manager = manager
        self._rows = rows
        self._admission = admission
        self._num_arrivals = 0

    # ------------------------------------------------------------------------------------------ messages

    def add(self, message: EngineRequest) -> None:
        """A request that can never run ends at once, with the reason; the others do not notice."""
        if message.request_id in self.requests:
            return  # a client that repeats an id gets the outputs of the first
        refusal = self._admission.bad_ids(_all_ids(message))
        if refusal is not None:
            self._refuse_unseen(message, refusal)
            return
        num_sequences = method_of(message.sampling).num_sequences(message.sampling)
        request = Request(message, self._num_arrivals, len(self._manager.groups), num_sequences)
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.queues.add(request)
        self._refuse_if_impossible(request)

    def extend(self, request_id: int, token_ids: list[int], is_final: bool) -> None:
        """Streaming prefill (4.4.4): the total grows as input arrives."""
        request = self.requests.get(request_id)
        if request is None or request.is_final:
            return
        refusal = self._admission.bad_ids(token_ids)
        if refusal is not None:
            self.end(request, "error", refusal)
            return
        request.num_prompt_tokens += len(token_ids)
        request.is_final = is_final
        if self._refuse_if_impossible(request):
            return
        (sequence,) = request.sequences.values()
        sequence.extend_prompt(np.asarray(token_ids, dtype=np.int32))
        if sequence.row < 0:
            return
        self._set_limits(sequence)
        self.changes.appended.append(AppendedTokens(row=sequence.row, token_ids=token_ids, is_final=is_final))
        if is_final and sequence.num_computed_tokens == sequence.num_total_tokens:
            # Everything is computed, but nothing was sampled: compute the last token once more. Its block may be
            # shared by now, so it must be asked for again.
            self.set_progress(sequence, sequence.num_total_tokens - 1)
            self._rows.writable_until[sequence.row] = sequence.num_computed_tokens

    def abort(self, request_ids: Iterable[int], sequence_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self.end(self.requests[request_id], "abort")
        for sequence_id in sequence_ids:
            request_id, index = split_sequence_id(sequence_id)
            request = self.requests.get(request_id)
            if request is not None and index in request.sequences:
                self.free(request.sequences[index], "abort")

    # ------------------------------------------------------------------------------------------ rows

    def place(self, sequence: Sequence) -> None:
        """The first step of a sequence gives it its row; a resumed one has kept it."""
        if sequence.row < 0:
            row = self.running.place(sequence)
            self._rows.next_block_end[row] = self._manager.block_size
            self._rows.set_stop_ids(row, sequence.request.stop_ids)
            self._set_limits(sequence)

    def set_progress(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Both sides take the same number: the worker learns it as an admission or as progress."""
        self._rows.num_computed[sequence.row] = num_computed_tokens
        if sequence.request.was_started:
            self.changes.progress.append((sequence.row, num_computed_tokens))
        else:
            self.changes.admitted.append(self._admission.message(sequence, num_computed_tokens))
            self.events.starts.append(self._admission.start_event(sequence, num_computed_tokens))

    def _set_limits(self, sequence: Sequence) -> None:
        request, row = sequence.request, sequence.row
        self._rows.max_total[row] = self._admission.max_total_tokens(request)
        self._rows.min_total[row] = request.num_prompt_tokens + request.sampling.min_tokens
        self._rows.is_watched[row] = request.num_reserved_rows > 0

    # ------------------------------------------------------------------------------------------ verbs (3.5.2)

    def show_tokens(self, rows: IntArray) -> None:
        """Decoding methods see the new token of each watched row, before any stop rule does."""
        for row in rows[self._rows.is_watched[rows]]:
            sequence = self.running.sequence_at(row)
            method = method_of(sequence.request.sampling)
            self._rows.is_watched[row] = method.after_token(sequence, self)

    def fork(self, parent: Sequence, index: int, num_total_tokens: int) -> Sequence:
        """A child of the same request: shares blocks, gets a row and a seed of its own."""
        request = parent.request
        tokens = parent.token_ids(0, num_total_tokens).copy()
        child = Sequence(request, index, tokens, request.seed_of(index), len(self._manager.groups))
        request.num_reserved_rows -= 1
        request.sequences[index] = child
        self.place(child)
        self._rows.is_watched[child.row] = False
        self._rows.num_computed[child.row] = num_total_tokens - 1
        self._manager.fork(parent, child)
        self.changes.forked.append(
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

    def free(
        self, sequence: Sequence, finish_reason: str, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        """The sequence ends, and its request with the last one."""
        request = sequence.request
        del request.sequences[sequence.index]
        if sequence.row >= 0:
            self._manager.free(sequence)
            self.running.remove(sequence)
            self.changes.release(sequence.row)
        self.events.ends.append(SequenceEnd(sequence.sequence_id, finish_reason, stop_reason, error))
        if not request.sequences:
            self._forget(request, finish_reason, error)

    # ------------------------------------------------------------------------------------------ ends

    def end(self, request: Request, finish_reason: str, error: str | None = None) -> None:
        for sequence in list(request.sequences.values()):
            self.free(sequence, finish_reason, error=error)

    def _forget(self, request: Request, finish_reason: str, error: str | None) -> None:
        for index in range(request.num_sequences - request.num_reserved_rows, request.num_sequences):
            # never forked, but the client waits for each of them
            sequence_id = sequence_id_of(request.request_id, index)
            self.events.ends.append(SequenceEnd(sequence_id, finish_reason, None, error))
        if request.status is Status.RUNNING:
            self.running.leave(request)
        self.queues.remove(request)
        request.status = Status.ENDED
        del self.requests[request.request_id]

    def _refuse_unseen(self, message: EngineRequest, reason: str) -> None:
        for index in range(method_of(message.sampling).num_sequences(message.sampling)):
            self.events.ends.append(SequenceEnd(sequence_id_of(message.request_id, index), "error", None, reason))

    def _refuse_if_impossible(self, request: Request) -> bool:
        refusal = self._admission.reason_to_refuse(request)
        if refusal is not None:
            self.end(request, "error", refusal)
        return refusal is not None

    def check_invariants(self) -> None:
        for sequence in self.running.living_sequences():
            request = sequence.request
            assert request.sequences.get(sequence.index) is sequence
            # 3.4.5: all or nothing
            assert request.status is Status.RUNNING or not any(sequence.block_tables), "a preempted one holds blocks"
        running = {request.request_id for request in self.running.requests}
        assert running == {number for number, request in self.requests.items() if request.status is Status.RUNNING}
        assert len(running) + len(self.queues) == len(self.requests), "a request is in no queue, or in two"


def _all_ids(message: EngineRequest) -> Iterator[int]:
    """Every token id that a request names; each of them indexes a table somewhere."""
    sampling = message.sampling
    yield from message.prompt_token_ids
    yield from (*sampling.stop_token_ids, *(sampling.allowed_token_ids or ()), *(sampling.logit_bias or ()))
    for word in message.bad_words_token_ids:
        yield from word

"""The life of requests: they arrive, get rows, fork, grow, and end, each sequence exactly once.

Owns the requests, the queues, who runs, and what worker and client must hear of it. It decides nothing about a step:
that is the scheduler's. Decoding methods reach it through the verbs of 3.5.2 (`decoding/method.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.engine_core.decoding import make_method
from quire.engine_core.decoding.method import DecodingMethod
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Sequence, Status
from quire.engine_core.rows import Rows, Tokens
from quire.engine_core.scheduler.admission import Admission, further_ids
from quire.engine_core.scheduler.first_tokens import FirstTokens
from quire.engine_core.scheduler.prerequisites import Prerequisites
from quire.engine_core.scheduler.queues import WaitingQueues
from quire.engine_core.scheduler.running import Running, StepsInFlight
from quire.engine_core.scheduler.speculation import Speculation
from quire.errors import RequestError, one_line
from quire.messages import (
    AdmittedSequence,
    AppendedTokens,
    Candidates,
    EngineRequest,
    ForkedSequence,
    IntArray,
    PermitTokens,
    SequenceEnd,
    SequenceLogprobs,
    SequenceStart,
    SequenceVector,
    TokenLogprobs,
    TokenMask,
    sequence_id_of,
    split_sequence_id,
)

logger = logging.getLogger("quire.scheduler")


@dataclass
class WorkerChanges:
    """For the worker, since the last SchedulerOutput: differences of its persistent rows."""

    forked: list[ForkedSequence] = field(default_factory=list)
    # by row, in order
    released: dict[int, None] = field(default_factory=dict)
    admitted: list[AdmittedSequence] = field(default_factory=list)
    progress: dict[int, int] = field(default_factory=dict)
    appended: dict[int, list[AppendedTokens]] = field(default_factory=dict)
    masked: dict[int, TokenMask | None] = field(default_factory=dict)

    def fork(self, fork: ForkedSequence) -> None:
        """Forks come first at the worker. A row that was freed since the last step is overwritten, not released."""
        assert fork.parent_row not in self.appended, "the worker forks before it appends"
        self.forked.append(fork)
        self.released.pop(fork.row, None)

    def append(self, appended: AppendedTokens) -> None:
        self.appended.setdefault(appended.row, []).append(appended)

    def release(self, row: int) -> None:
        """The row is given back; what was still to be said about it is void."""
        num_admitted = len(self.admitted)
        if num_admitted:
            self.admitted = [sequence for sequence in self.admitted if sequence.row != row]
        if len(self.admitted) == num_admitted:  # else the worker has not heard of the sequence
            self.released[row] = None
        self.progress.pop(row, None)
        self.appended.pop(row, None)
        self.masked.pop(row, None)


@dataclass
class ClientEvents:
    """For the client: sequences that began, grew by a choice of the core, or ended."""

    starts: list[SequenceStart] = field(default_factory=list)
    # (sequence_id, token_id) of outputs whose tokens the core chose, in order
    tokens: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)
    vectors: list[SequenceVector] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.starts or self.tokens or self.ends or self.vectors)

    def end(
        self,
        sequence_id: int,
        finish_reason: str,
        stop_reason: int | None = None,
        error: str | None = None,
        drafts: tuple[int, int] = (0, 0),
        *,
        is_refused: bool = False,
    ) -> None:
        self.ends.append(SequenceEnd(sequence_id, finish_reason, stop_reason, error, *drafts, is_refused))

    def grow(self, sequence_id: int, token_ids: Iterable[int], logprobs: list[TokenLogprobs]) -> None:
        self.tokens.extend((sequence_id, token) for token in token_ids)
        if logprobs:
            self.logprobs.append(SequenceLogprobs(sequence_id, logprobs))


class Blaming:
    """What is raised within it is noted as the fault of a request. (A generator would take three times as long.)"""

    __slots__ = ("_blamed", "_request", "_what")

    def __init__(self, request: Request, what: str, blamed: dict[int, str]) -> None:
        self._request = request
        self._what = what
        self._blamed = blamed

    def __enter__(self) -> None:
        """Nothing has happened yet."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        request_id = self._request.request_id
        logger.error("request %d: %s", request_id, self._what, exc_info=error)
        self._blamed[request_id] = f"{self._what}: {type(error).__name__}: {one_line(error)}"
        return True


class Lifecycle:
    """Requests by id, from arrival to end."""

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        admission: Admission,
        speculation: Speculation,
        in_flight: StepsInFlight,
        prerequisites: Prerequisites,
        first_tokens: FirstTokens,
    ) -> None:
        self._prerequisites = prerequisites
        self._first_tokens = first_tokens
        self.requests: dict[int, Request] = {}
        # those of whose prompts more may come, and those that need permits
        self.open_inputs: dict[int, Request] = {}
        self.queues = WaitingQueues()
        self._shares = self.queues.shares
        self.running = Running(rows)
        self.changes = WorkerChanges()
        self.events = ClientEvents()
        self._methods: dict[int, DecodingMethod] = {}
        self._blamed: dict[int, str] = {}
        self.num_failed = 0
        self.is_in_doubt = False
        self._manager = manager
        self._kept = manager.kept
        self._rows = rows
        self._admission = admission
        self._speculation = speculation
        self._in_flight = in_flight
        self.recorder = manager.pool.recorder
        self.num_arrivals = 0

    def take_changes(self) -> WorkerChanges:
        """For the workers, since the last call."""
        changes = self.changes
        self.changes = WorkerChanges()
        return changes

    # ------------------------------------------------------------------------------------------ messages

    def add(self, message: EngineRequest) -> None:
        """A request that can never run ends at once, with the reason; the others do not notice."""
        if message.request_id in self.requests:
            return  # a client that repeats an id gets the outputs of the first
        message = self._prerequisites.meant_by(message)
        can = self._admission
        sent, refusal = can.checked(message.prompt_token_ids)
        refusal = refusal or can.bad_ids(further_ids(message)) or can.bad_handle(message)
        refusal = refusal or can.bad_pooling(message) or can.bad_permits(message)
        if refusal is not None:
            self._refuse_unseen(message.request_id, message.sampling.n, refusal)
            return
        try:
            method = make_method(message)
        except RequestError as error:
            self._refuse_unseen(message.request_id, message.sampling.n, str(error))
            return
        prompt = self._prompt_of(message, sent)
        request = Request(
            message,
            method,
            self.num_arrivals,
            prompt,
            is_private=not self._manager.keeps_contents,
            content=self._prerequisites.content_of(message),
            sees_all=can.sees_all,
        )
        request.sequences[0] = Sequence(request, 0, prompt, message.seed, len(self._manager.groups))
        if request.scope:
            self._kept.set_public_part(request)
        request.max_total = self._admission.max_total_tokens(request)
        request.tenant = self._shares.enter(message.tenant)
        self.num_arrivals += 1
        self.requests[request.request_id] = request
        self._methods[request.request_id] = method
        if not request.is_final or message.permitted is not None:
            self.open_inputs[request.request_id] = request
        self.queues.add(request)
        if self._refuse(request, can.reason_of_kind(request) or can.reason_of_memory(request)):
            return
        self.recorder.arrived(request.request_id, request.num_prompt_tokens, request.num_sequences)
        if self._prerequisites.ask(request):
            self.queues.remove(request)
            self.queues.await_arrival(request)

    def line_up_ready(self) -> None:
        """Those that wait for nothing any more get their places in line, or hear why they cannot go on."""
        for request, refusal in self._prerequisites.arrived():
            if not self._refuse(request, refusal):
                self.queues.add(request)

    def _prompt_of(self, message: EngineRequest, sent: Tokens) -> Tokens:
        """What was sent, behind what it continues."""
        kept = self._kept.find(message.continues) if message.continues is not None else None
        return sent if kept is None else np.concatenate([kept.tokens, sent])

    def extend(self, request_id: int, token_ids: list[int], is_final: bool) -> None:
        """Streaming prefill (4.4.4): the total grows as input arrives."""
        request = self.requests.get(request_id)
        if request is None or request.is_final or not (token_ids or is_final):  # an empty piece says nothing
            return
        if self._refuse(request, self._admission.bad_ids(token_ids)):
            return
        request.num_prompt_tokens += len(token_ids)
        request.is_final = is_final
        if is_final and request.message.permitted is None:
            del self.open_inputs[request_id]
        if self._refuse(request, self._admission.reason_of_kind(request)):
            return
        (sequence,) = request.sequences.values()
        sequence.extend_prompt(np.asarray(token_ids, dtype=np.int32))
        if request.scope:
            self._kept.set_public_part(request)
        request.max_total = self._admission.max_total_tokens(request)
        if self._refuse(request, self._admission.reason_of_memory(request)):
            return
        if request.status is Status.WAITING and not self.queues.is_awaiting(request):
            self.queues.add(request)
        if sequence.row < 0:
            return
        self._set_limits(sequence)
        self.changes.append(AppendedTokens(row=sequence.row, token_ids=token_ids, is_final=is_final))
        if is_final and sequence.num_computed_tokens == sequence.num_total_tokens:
            # Everything is computed, but nothing was sampled: compute the last token once more.
            self.set_progress(sequence, sequence.num_total_tokens - 1)
            self._manager.must_ask(sequence)

    def permit(self, permit: PermitTokens) -> None:
        """Somebody outside has looked at a sequence. It goes on so far, with these tokens first."""
        request = self.requests.get(permit.request_id)
        sequence = request.sequences.get(permit.index) if request is not None else None
        if request is None or sequence is None or sequence.num_permitted is None:
            return
        mask = permit.mask or TokenMask()
        if self._refuse(request, self._admission.bad_ids([*permit.token_ids, *mask.banned, *(mask.allowed or ())])):
            return
        if permit.mask != sequence.mask:
            sequence.mask = permit.mask
            if sequence.is_admitted:
                self.changes.masked[sequence.row] = permit.mask
        # of the tokens that are there no promise is taken back, and a step in flight may be bringing one
        if permit.token_ids and sequence.num_known_tokens != sequence.num_total_tokens:
            raise RequestError("tokens can only be put where a sequence waits")
        sequence.num_permitted = max(sequence.num_permitted, permit.num_tokens)
        if sequence.row >= 0:
            self._set_limits(sequence)
        if permit.token_ids:
            self._put(sequence, permit.token_ids)

    def _put(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Tokens that come next: as if they had been sampled, and each was certain."""
        request = sequence.request
        has_logprobs = request.sampling.logprobs is not None
        least = request.num_prompt_tokens + request.sampling.min_tokens
        for token in token_ids:
            if sequence.row < 0:
                sequence.extend_prompt(np.asarray([token], dtype=np.int32))
            elif sequence.is_admitted:
                self.append(sequence, token)
            else:
                self._rows.append(sequence.row, token)
            self.events.grow(
                sequence.sequence_id, [token], [TokenLogprobs([token], [0.0], [1])] if has_logprobs else []
            )
            num_tokens = sequence.num_total_tokens
            if token in request.stop_ids and num_tokens >= least:
                self.end_output(sequence, "stop", stop_reason=token if token in request.asked_for_ids else None)
                return
            if num_tokens >= request.max_total:
                self.end_output(sequence, "length")
                return

    def abort(self, request_ids: Iterable[int], sequence_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self.end_request(self.requests[request_id], "abort")
        for sequence_id in sequence_ids:
            request_id, index = split_sequence_id(sequence_id)
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.shape.num_candidates:
                self.finish(request, index, "abort")
            elif index in request.sequences:
                # a stop string, which only the client can see: it may well want to go on from here
                self.end_output(request.sequences[index], "abort")

    # ------------------------------------------------------------------------------------------ rows

    def place(self, sequence: Sequence) -> None:
        """The first step of a sequence gives it its row; a resumed one has kept it, as a rule."""
        if sequence.row < 0:
            self.running.place(sequence)
            self._rows.set_stop_ids(sequence.row, sequence.request.stop_ids)
            self._speculation.reset(sequence.row)
            self._set_limits(sequence)

    def set_progress(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Both sides take the same number: the worker learns it as an admission or as progress."""
        self._rows.set_back(sequence.row, num_computed_tokens)
        if sequence.is_admitted:
            self.changes.progress[sequence.row] = num_computed_tokens
            return
        sequence.is_admitted = True
        self.changes.admitted.append(self._admission.message(sequence, num_computed_tokens))
        if not sequence.request.is_announced:
            sequence.request.is_announced = True
            self.events.starts.append(self._admission.start_event(sequence, num_computed_tokens))
            self._first_tokens.begin(sequence.row, sequence.sequence_id, num_computed_tokens)

    def displace(self, request: Request) -> None:
        """The rows of a request that gave way go to a more important one; it will be admitted anew."""
        for sequence in request.sequences.values():
            if sequence.row >= 0:
                row = sequence.row
                is_known = sequence.is_admitted
                sequence.earlier_drafts = self._drafts_of(sequence)
                sequence.unplace()
                sequence.is_admitted = False
                self._give_back(row, is_known)
        self.running.leave_rows(request)
        self.recorder.displaced(request.request_id)

    def _drafts_of(self, sequence: Sequence) -> tuple[int, int]:
        """(drafts, accepted ones) since it began."""
        earlier = sequence.earlier_drafts
        if sequence.row < 0:
            return earlier
        now = self._speculation.counts(sequence.row)
        return earlier[0] + now[0], earlier[1] + now[1]

    def _set_limits(self, sequence: Sequence) -> None:
        request = sequence.request
        least = request.num_prompt_tokens + request.sampling.min_tokens
        self._rows.set_limits(sequence.row, request.max_total, least)
        if sequence.num_permitted is not None:
            self._rows.permit(sequence.row, request.num_sent_tokens + sequence.num_permitted)
        self._watch(sequence, sequence.is_watched)

    def _watch(self, sequence: Sequence, is_watched: bool) -> None:
        request = sequence.request
        sequence.is_watched = is_watched
        stops = bool(is_watched or request.shape.num_candidates or request.message.pooling)
        self._rows.watch(sequence.row, is_watched=is_watched, runs_on=request.is_final and not stops)

    # ------------------------------------------------------------------------------------------ verbs (3.5.2)

    def show_tokens(self, rows: IntArray) -> None:
        """Decoding methods see the new token of each watched row, before any stop rule does."""
        is_watched = self._rows.is_watched[rows]
        if not np.count_nonzero(is_watched):
            return
        for row in rows[is_watched].tolist():
            sequence = self.running.sequence_at(row)
            method = self._methods[sequence.request.request_id]
            with self.blaming(sequence.request, "its decoding method failed"):
                self._watch(sequence, method.after_token(sequence, self))

    def answers_of(self, candidates: dict[int, Candidates]) -> dict[int, dict[int, Candidates]]:
        """By request and index of the sequence."""
        answers: dict[int, dict[int, Candidates]] = {}
        for row, found in candidates.items():
            sequence = self.running.find(row)
            if sequence is not None:
                answers.setdefault(sequence.request.request_id, {})[sequence.index] = found
        return answers

    def show_candidates(self, answers: dict[int, dict[int, Candidates]]) -> None:
        """Decoding methods choose what the worker does not."""
        for request_id, by_index in answers.items():
            request = self.requests[request_id]
            with self.blaming(request, "its decoding method failed"):
                self._methods[request_id].after_candidates(request, by_index, self)

    def blaming(self, request: Request, what: str) -> Blaming:
        """What is done for one request and raises ends that one, once the step has been looked through."""
        return Blaming(request, what, self._blamed)

    def end_blamed(self) -> None:
        if self._blamed:
            blamed = self._blamed.copy()
            self._blamed.clear()
            for request_id, reason in blamed.items():
                self.fail(request_id, reason)

    def fork(self, parent: Sequence, index: int, num_total_tokens: int, num_computed_tokens: int) -> Sequence:
        """A child of the same request: shares blocks, gets a row and a seed of its own.

        The worker forks before it appends, so nothing may have been appended to the parent since the last step.
        """
        request = parent.request
        if not parent.is_begun:  # it gave way while its token was on the way, and begins anew, as its child does
            num_computed_tokens = 0
        tokens = parent.token_ids(0, num_total_tokens)
        child = Sequence(request, index, tokens, request.seed_of(index), len(self._manager.groups))
        request.sequences[index] = child
        self._reserve(request, -1)
        self.place(child)
        child.is_admitted = True
        self._watch(child, False)
        self._rows.begin_at(child.row, num_computed_tokens)
        self._manager.fork(parent, child)
        self.recorder.forked(child.sequence_id, len(child.block_tables[0]))
        self.changes.fork(
            ForkedSequence(
                parent_row=parent.row,
                row=child.row,
                sequence_id=child.sequence_id,
                num_total_tokens=num_total_tokens,
                num_computed_tokens=num_computed_tokens,
                seed=child.seed,
            )
        )
        return child

    def append(self, sequence: Sequence, token_id: int) -> None:
        self._rows.append(sequence.row, token_id)
        self.changes.append(AppendedTokens(row=sequence.row, token_ids=[token_id]))

    def drop(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self._reserve(sequence.request, 1)

    def emit(self, request: Request, output: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        if output in request.open_outputs and token_ids:
            self.events.grow(sequence_id_of(request.request_id, output), token_ids, logprobs)

    def finish(
        self,
        request: Request,
        output: int,
        finish_reason: str,
        stop_reason: int | None = None,
        error: str | None = None,
        drafts: tuple[int, int] = (0, 0),
    ) -> None:
        if output in request.open_outputs:
            request.open_outputs.discard(output)
            number = sequence_id_of(request.request_id, output)
            self.events.end(number, finish_reason, stop_reason, error, drafts, is_refused=request.is_refused)
            self.recorder.ended(number, finish_reason, len(request.open_outputs))
            if not request.open_outputs:
                self._close(request)

    # ------------------------------------------------------------------------------------------ ends

    def end_output(self, sequence: Sequence, finish_reason: str, stop_reason: int | None = None) -> None:
        """A sampled sequence ends, and its output with it; its request with the last one."""
        request = sequence.request
        num_settled = self._in_flight.num_settled(sequence, self._rows)
        self._manager.end_output(sequence, num_settled)
        if sequence.index == 0 and request.message.keep is not None:
            self._kept.keep(request.message.keep, sequence, num_settled)
        drafts = self._drafts_of(sequence)
        self._remove(sequence)
        self.finish(request, sequence.index, finish_reason, stop_reason, drafts=drafts)
        if not request.sequences:
            self.end_request(request, finish_reason)  # what was never forked; the client waits for each of them

    def end_with_vector(self, sequence: Sequence, values: bytes) -> None:
        """Its answer is a vector, and no token."""
        self.events.vectors.append(SequenceVector(sequence.sequence_id, values))
        self.end_output(sequence, "stop")

    def end_request(self, request: Request, finish_reason: str, error: str | None = None) -> None:
        for output in sorted(request.open_outputs):
            self.finish(request, output, finish_reason, error=error)

    def fail(self, request_id: int, reason: str, num_outputs: int = 0) -> None:
        """Something went wrong while a request was attended to: it ends, and what it has computed is forgotten. Of one
        that is not known, so many outputs end."""
        self.num_failed += 1
        self.is_in_doubt = True
        request = self.requests.get(request_id)
        if request is None:
            self._refuse_unseen(request_id, num_outputs, reason)
            return
        for sequence in request.sequences.values():
            self._manager.forget(sequence)
        self.end_request(request, "error", reason)
        if request_id in self.requests:  # its outputs had ended, and the failure came in between
            self._close(request)

    def take_doubt(self) -> bool:
        """Whether a request has failed so since the last call."""
        is_in_doubt = self.is_in_doubt
        self.is_in_doubt = False
        return is_in_doubt

    def _remove(self, sequence: Sequence) -> None:
        """The sequence lets go of its blocks and of its row."""
        del sequence.request.sequences[sequence.index]
        self._manager.free(sequence)
        if sequence.row >= 0:
            self._give_back(sequence.row, sequence.is_admitted)

    def _give_back(self, row: int, is_known: bool) -> None:
        """The worker may not have heard of the row yet: that of one that was about to be resumed."""
        self.running.remove(row)
        if is_known:
            self.changes.release(row)

    def _close(self, request: Request) -> None:
        for sequence in list(request.sequences.values()):
            self._remove(sequence)
        self._reserve(request, -request.num_reserved_rows)
        if request.status is Status.RUNNING:
            self.running.leave(request)
        else:
            self.queues.remove(request)
        self._shares.leave(request.tenant)
        self._prerequisites.ended(request)
        request.become(Status.ENDED)
        del self.requests[request.request_id], self._methods[request.request_id]
        self.open_inputs.pop(request.request_id, None)

    def _reserve(self, request: Request, num_rows: int) -> None:
        """Rows that are set aside for forks of requests that have rows."""
        request.num_reserved_rows += num_rows
        if request.holds_rows:
            self.running.num_reserved_rows += num_rows

    def _refuse_unseen(self, request_id: int, num_outputs: int, reason: str) -> None:
        self.recorder.refused(request_id, reason)
        for index in range(num_outputs):
            self.events.end(sequence_id_of(request_id, index), "error", error=reason)

    def _refuse(self, request: Request, refusal: str | None) -> bool:
        if refusal is not None:
            self.recorder.refused(request.request_id, refusal)
            self.end_request(request, "error", refusal)
        return refusal is not None

    def check_invariants(self) -> None:
        for sequence in self.running.living_sequences():
            request = sequence.request
            assert request.sequences.get(sequence.index) is sequence
            # 3.4.5: all or nothing
            assert request.status is Status.RUNNING or not any(map(len, sequence.block_tables)), "out, with blocks"
            assert request.status is Status.PREEMPTED or not sequence.host_tables, "in, with host blocks"
        running = {request.request_id for request in self.running.requests}
        assert running == {number for number, request in self.requests.items() if request.status is Status.RUNNING}
        in_order = [one.row for request in self.running.requests for one in request.sequences.values()]
        assert self.running.rows_in_order().tolist() == in_order, "the rows of those who run are others"
        self._shares.check_invariants(len(self.requests))
        assert len(running) + len(self.queues) == len(self.requests), "a request is in no queue, or in two"

"""The recorder: what the engine decided, step by step, and why. Bounded, and it decides nothing itself.

Scheduler, lifecycle and block pool call its hooks when something has been settled; nobody asks it anything on the way
of a step. `Recorder` is the null object: nobody listens. `DecisionRecorder` keeps three rings:

    steps       a step: when, who was granted how many tokens, how many run, wait, and hold blocks
    decisions   what became of a request, each with its reason (observability/decisions.py)
    blocks      what became of blocks: handed out, revived, cached, freed, evicted, attached, copied, swapped

The clock is handed in; the core has none, and no time that is kept here ever comes back into a decision.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from quire.messages import IntArray, SchedulerOutput
from quire.observability.decisions import Decision, reason_of_refusal
from quire.observability.recorded import BlockChange, RecordedStep
from quire.observability.ring import Ring

# requests that run, wait (those that gave way included), gave way; blocks held and cached
Counts = tuple[int, int, int, int, int]
# what happens in nearly every step under load is told of so often
_SECONDS_BETWEEN_SUMS = 1.0
# steps whose end is remembered while newer ones are decided
_NUM_ENDS = 1 << 14
# shares of the memory
_FOR_STEPS, _FOR_DECISIONS = 0.5, 0.25


class Recorder:
    """The hooks, and nobody who listens."""

    def attach(self, sequence_id: IntArray, counts: Callable[[], Counts]) -> None:
        """By the scheduler, once: the sequence in each row, and what is counted now and then."""

    # ------------------------------------------------------------------------------------------ requests

    def arrived(self, request_id: int, num_prompt_tokens: int, num_sequences: int) -> None:
        """It was accepted, and waits."""

    def refused(self, request_id: int, reason: str) -> None:
        """It could never run. The text is for its client; what is kept says only what kind of reason it is."""

    def turned_away(self, request_id: int, lacks: str, needed: int, there: int) -> None:
        """It is the next in line and could not start; lacks: memory or rows."""

    def started(self, request_id: int, how: str, num_sequences: int) -> None:
        """It runs from this step on: new, again (it is computed again) or swap (it was brought back)."""

    def found(self, sequence_id: int, num_tokens: int, num_fetched: int, num_total: int) -> None:
        """A sequence begins behind what the prefix cache and a connector have of its tokens."""

    def preempted(self, request_id: int, reason: str, *, is_swapped: bool) -> None:
        """It gave way."""

    def displaced(self, request_id: int) -> None:
        """One that had given way lost its rows as well."""

    def forked(self, sequence_id: int, num_blocks: int) -> None:
        """A child shares so many blocks of its parent."""

    def ended(self, sequence_id: int, finish_reason: str, num_open: int) -> None:
        """An output is complete: stop, length, abort, error. So many of its request are not."""

    # ------------------------------------------------------------------------------------------ steps

    def decided(self, decision: SchedulerOutput) -> None:
        """A step goes to the workers."""

    def settled(self, step: int) -> None:
        """Its results are here."""

    # ------------------------------------------------------------------------------------------ blocks

    def allocated(self, blocks: list[int], num_evicted: int) -> None:
        """These were handed out; the last num_evicted of them were cached until now."""

    def revived(self, blocks: list[int]) -> None:
        """Cached blocks are held again."""

    def released(self, blocks: list[int], freed: list[int]) -> None:
        """Nobody holds these any more; those that were not freed are cached."""

    def forgotten(self, blocks: Sequence[int]) -> None:
        """Cached blocks became free, because their content is not to be found any more."""


class DecisionRecorder(Recorder):
    """Keeps the newest that fits into `num_bytes`, counted as what Python needs for it."""

    def __init__(self, num_bytes: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps: Ring[RecordedStep] = Ring(int(num_bytes * _FOR_STEPS))
        self.decisions: Ring[Decision] = Ring(int(num_bytes * _FOR_DECISIONS))
        self.blocks: Ring[BlockChange] = Ring(int(num_bytes * (1 - _FOR_STEPS - _FOR_DECISIONS)))
        # the step that is being decided
        self.step = 1
        self._sequence_id: IntArray = np.empty(0, dtype=np.int64)
        self._count: Callable[[], Counts] = lambda: (0, 0, 0, 0, 0)
        self._counts: Counts = (0, 0, 0, 0, 0)
        self._ids = self._tokens = b""
        self._ends = array("d", bytes(8 * _NUM_ENDS))
        self._num_evicted = self._num_copied = 0
        self._sums_at = 0.0
        # (when, the copies) of copies on write
        self.copies: deque[tuple[float, list[int]]] = deque(maxlen=256)

    def attach(self, sequence_id: IntArray, counts: Callable[[], Counts]) -> None:
        self._sequence_id, self._count = sequence_id, counts

    def end_of(self, step: int) -> float:
        """When the results of a recorded step came; 0: they have not come, or that is too long ago."""
        return self._ends[step % _NUM_ENDS] if self.step - step < _NUM_ENDS else 0.0

    # ------------------------------------------------------------------------------------------ requests

    def arrived(self, request_id: int, num_prompt_tokens: int, num_sequences: int) -> None:
        self._decide("arrived", request_id, 0, num_prompt_tokens, num_sequences)

    def refused(self, request_id: int, reason: str) -> None:
        self._decide("refused", request_id, why=reason_of_refusal(reason))

    def turned_away(self, request_id: int, lacks: str, needed: int, there: int) -> None:
        self._decide("turned_away", request_id, 0, needed, there, lacks)

    def started(self, request_id: int, how: str, num_sequences: int) -> None:
        self._decide("started", request_id, 0, num_sequences, why=how)

    def found(self, sequence_id: int, num_tokens: int, num_fetched: int, num_total: int) -> None:
        if num_tokens:
            self._decide_of("found", sequence_id, num_tokens, num_total)
        if num_fetched:
            self._decide_of("fetched", sequence_id, num_fetched, num_total)

    def preempted(self, request_id: int, reason: str, *, is_swapped: bool) -> None:
        self._decide("preempted", request_id, 0, int(is_swapped), why=reason)

    def displaced(self, request_id: int) -> None:
        self._decide("displaced", request_id)

    def forked(self, sequence_id: int, num_blocks: int) -> None:
        self._decide_of("forked", sequence_id, num_blocks)

    def ended(self, sequence_id: int, finish_reason: str, num_open: int) -> None:
        self._decide_of("ended", sequence_id, num_open, why=finish_reason)

    def _decide_of(self, kind: str, sequence_id: int, amount: int = 0, other: int = 0, why: str = "") -> None:
        self._decide(kind, sequence_id >> 10, sequence_id & 1023, amount, other, why)

    def _decide(
        self, kind: str, request_id: int, sequence: int = 0, amount: int = 0, other: int = 0, why: str = ""
    ) -> None:
        decision = Decision(
            self.decisions.next_number, self.step, self.clock(), kind, request_id, sequence, amount, other, why
        )
        self.decisions.append(decision, 160 + len(why))

    # ------------------------------------------------------------------------------------------ steps

    def decided(self, decision: SchedulerOutput) -> None:
        now = self.clock()
        step = self.step = decision.step
        ids, tokens = self._sequence_id[decision.rows].tobytes(), decision.num_tokens.tobytes()
        # In a steady step the same sequences get a token each: the columns of the last one say so, and cost nothing.
        size = 200
        if ids == self._ids:
            ids = self._ids
        else:
            self._ids = ids
            size += len(ids)
        if tokens == self._tokens:
            tokens = self._tokens
        else:
            self._tokens = tokens
            size += len(tokens)
        if decision.block_writes.size or decision.admitted or decision.released or not step & 15:
            self._note_changes(decision, now)
        self.steps.append((step, now, ids, tokens, self._counts), size)
        self._ends[step % _NUM_ENDS] = 0.0
        self.step = step + 1

    def settled(self, step: int) -> None:
        self._ends[step % _NUM_ENDS] = self.clock()

    def _note_changes(self, decision: SchedulerOutput, now: float) -> None:
        """What is not there in most steps."""
        self._counts = self._count()
        if decision.block_writes.size:
            writes = decision.block_writes
            owners = self._sequence_id[writes[1]]
            self._change("attached", np.concatenate([owners, writes[2], writes[3]]).tobytes())
        for kind, columns in (
            ("swapped_out", decision.swapped_out),
            ("swapped_in", decision.swapped_in),
            ("copied", decision.block_copies),
        ):
            if columns.size:
                self._change(kind, columns.tobytes())
        if decision.block_copies.size:
            self._num_copied += decision.block_copies.shape[1]
            self.copies.append((now, decision.block_copies[1].tolist()))
        if (self._num_copied or self._num_evicted) and now - self._sums_at >= _SECONDS_BETWEEN_SUMS:
            self._tell_sums(now)

    def _tell_sums(self, now: float) -> None:
        if self._num_copied:
            self._decide("copied", -1, 0, self._num_copied)
        if self._num_evicted:
            self._decide("evicted", -1, 0, self._num_evicted)
        self._num_copied = self._num_evicted = 0
        self._sums_at = now

    # ------------------------------------------------------------------------------------------ blocks

    def allocated(self, blocks: list[int], num_evicted: int) -> None:
        if not blocks:
            return
        if num_evicted:
            self._num_evicted += num_evicted
            self._change("evicted", _packed(blocks[-num_evicted:]))
        self._change("allocated", _packed(blocks))

    def revived(self, blocks: list[int]) -> None:
        self._change("revived", _packed(blocks))

    def released(self, blocks: list[int], freed: list[int]) -> None:
        if freed:
            self._change("freed", _packed(freed))
        if len(freed) < len(blocks):
            is_freed = set(freed)
            self._change("cached", _packed([block for block in blocks if block not in is_freed]))

    def forgotten(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._change("forgotten", _packed(blocks))

    def _change(self, kind: str, columns: bytes) -> None:
        self.blocks.append((self.step, kind, columns), 120 + len(columns))


def _packed(blocks: Sequence[int]) -> bytes:
    return array("q", blocks).tobytes()

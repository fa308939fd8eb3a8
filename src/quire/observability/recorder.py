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
from collections.abc import Callable
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from quire.messages import IntArray, SchedulerOutput, split_sequence_id
from quire.observability.decisions import reason_of_refusal
from quire.observability.recorded import RecordedChange, RecordedDecision, RecordedStep

# requests that run, wait (those that gave way included), gave way; blocks held and cached
Counts = tuple[int, int, int, int, int]
# what happens in nearly every step under load is told of so often
_SECONDS_BETWEEN_SUMS = 1.0
# steps whose end is remembered while newer ones are decided
_NUM_ENDS = 1 << 14
# shares of the memory
_FOR_STEPS = 0.5
_FOR_DECISIONS = 0.25


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

    def went_on(self, step: int, num_tokens: int) -> None:
        """It has computed so many tokens more of each row than it was granted. Comes behind `settled`."""

    # ------------------------------------------------------------------------------------------ blocks

    def allocated(self, blocks: list[int], num_evicted: int) -> None:
        """These were handed out; the last num_evicted of them were cached until now."""

    def revived(self, blocks: list[int]) -> None:
        """Cached blocks are held again."""

    def released(self, blocks: list[int], freed: list[int]) -> None:
        """Nobody holds these any more; those that were not freed are cached."""

    def forgotten(self, blocks: list[int]) -> None:
        """Cached blocks became free, because their content is not to be found any more."""


class DecisionRecorder(Recorder):
    """Keeps the newest that fits into `num_bytes`, counted as what Python needs for it.

    A hook costs a fraction of a microsecond: it keeps what it is given as it is, and whoever reads it (recorded.py)
    does the work.
    """

    def __init__(self, num_bytes: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        # tells one engine from the next, whose numbers begin anew
        self.began = clock()
        self.steps: Ring[RecordedStep] = Ring(int(num_bytes * _FOR_STEPS))
        self.decisions: Ring[RecordedDecision] = Ring(int(num_bytes * _FOR_DECISIONS))
        self.blocks: Ring[RecordedChange] = Ring(int(num_bytes * (1 - _FOR_STEPS - _FOR_DECISIONS)))
        # (when, the copies) of copies on write
        self.copies: deque[tuple[float, list[int]]] = deque(maxlen=256)
        # the step that is being decided
        self.step = 1
        self._sequence_id: IntArray = np.empty(0, dtype=np.int64)
        # the same as it was when somebody got a row the last time; never changed, so that steps may share it
        self._owners = self._sequence_id
        self._count: Callable[[], Counts] = lambda: (0, 0, 0, 0, 0)
        self._counts: Counts = (0, 0, 0, 0, 0)
        self._ends = array("d", bytes(8 * _NUM_ENDS))
        self._num_more = array("q", bytes(8 * _NUM_ENDS))
        self._num_settled = 0
        self._num_evicted = self._num_copied = 0
        self._sums_at = 0.0

    def attach(self, sequence_id: IntArray, counts: Callable[[], Counts]) -> None:
        self._sequence_id = sequence_id
        self._count = counts

    def end_of(self, step: int) -> float:
        """When the results of a recorded step came; 0: they have not come, or that is too long ago."""
        is_known = self._num_settled - _NUM_ENDS < step <= self._num_settled
        return self._ends[step % _NUM_ENDS] if is_known else 0.0

    def num_more_of(self, step: int) -> int:
        """Tokens of each row that a step has computed beyond what its record says."""
        return self._num_more[step % _NUM_ENDS] if self.end_of(step) else 0

    # ------------------------------------------------------------------------------------------ requests

    def arrived(self, request_id: int, num_prompt_tokens: int, num_sequences: int) -> None:
        self._tell("arrived", request_id, 0, num_prompt_tokens, num_sequences)

    def refused(self, request_id: int, reason: str) -> None:
        self._tell("refused", request_id, 0, 0, 0, reason_of_refusal(reason))

    def turned_away(self, request_id: int, lacks: str, needed: int, there: int) -> None:
        self._tell("turned_away", request_id, 0, needed, there, lacks)

    def started(self, request_id: int, how: str, num_sequences: int) -> None:
        self._tell("started", request_id, 0, num_sequences, 0, how)

    def found(self, sequence_id: int, num_tokens: int, num_fetched: int, num_total: int) -> None:
        if num_tokens:
            self._tell("found", *split_sequence_id(sequence_id), num_tokens, num_total)
        if num_fetched:
            self._tell("fetched", *split_sequence_id(sequence_id), num_fetched, num_total)

    def preempted(self, request_id: int, reason: str, *, is_swapped: bool) -> None:
        self._tell("preempted", request_id, 0, int(is_swapped), 0, reason)

    def displaced(self, request_id: int) -> None:
        self._tell("displaced", request_id)

    def forked(self, sequence_id: int, num_blocks: int) -> None:
        self._tell("forked", *split_sequence_id(sequence_id), num_blocks)

    def ended(self, sequence_id: int, finish_reason: str, num_open: int) -> None:
        self._tell("ended", *split_sequence_id(sequence_id), num_open, 0, finish_reason)

    def _tell(
        self, kind: str, request_id: int, sequence: int = 0, amount: int = 0, other: int = 0, why: str = ""
    ) -> None:
        # a reason is mostly one of a few texts
        self.decisions.append((self.step, self.clock(), kind, request_id, sequence, amount, other, why), 240)

    # ------------------------------------------------------------------------------------------ steps

    def decided(self, decision: SchedulerOutput) -> None:
        now = self.clock()
        step = decision.step
        rows = decision.rows
        # two arrays and their heads, kept as they are: nobody writes into a decision once it is made
        size = 480 + 16 * len(rows)
        if decision.admitted or decision.released or decision.forked or not step & 15:
            self._owners, size = self._sequence_id.copy(), size + self._sequence_id.nbytes
            self._counts = self._count()
        written = decision.block_writes.size
        if written:
            self.blocks.append((step, "attached", (self._owners, decision.block_writes)), 440 + 8 * written)
        if decision.swapped_out.size or decision.swapped_in.size or decision.block_copies.size:
            self._note_moves(decision, now)
        if self._num_evicted or self._num_copied:
            self._tell_sums(now)
        self.steps.append((step, now, self._owners, rows, decision.num_tokens, self._counts), size)
        self.step = step + 1

    def settled(self, step: int) -> None:
        self._ends[step % _NUM_ENDS] = self.clock()
        self._num_more[step % _NUM_ENDS] = 0
        self._num_settled = step

    def went_on(self, step: int, num_tokens: int) -> None:
        self._num_more[step % _NUM_ENDS] = num_tokens

    def _note_moves(self, decision: SchedulerOutput, now: float) -> None:
        """Of the contents of blocks."""
        for kind, columns in (("swapped_out", decision.swapped_out), ("swapped_in", decision.swapped_in)):
            if columns.size:
                self._change(kind, columns, columns.nbytes)
        if decision.block_copies.size:
            self._change("copied", decision.block_copies, decision.block_copies.nbytes)
            self._num_copied += decision.block_copies.shape[1]
            self.copies.append((now, decision.block_copies[1].tolist()))

    def _tell_sums(self, now: float) -> None:
        if now - self._sums_at < _SECONDS_BETWEEN_SUMS:
            return
        if self._num_copied:
            self._tell("copied", -1, 0, self._num_copied)
        if self._num_evicted:
            self._tell("evicted", -1, 0, self._num_evicted)
        self._num_copied = self._num_evicted = 0
        self._sums_at = now

    # ------------------------------------------------------------------------------------------ blocks

    def allocated(self, blocks: list[int], num_evicted: int) -> None:
        self._num_evicted += num_evicted
        self.blocks.append((self.step, "allocated", (blocks, num_evicted)), 400 + 8 * len(blocks))

    def revived(self, blocks: list[int]) -> None:
        self._change("revived", blocks, 8 * len(blocks))

    def released(self, blocks: list[int], freed: list[int]) -> None:
        self.blocks.append((self.step, "released", (blocks, freed)), 440 + 16 * len(blocks))

    def forgotten(self, blocks: list[int]) -> None:
        self._change("forgotten", blocks, 8 * len(blocks))

    def _change(self, kind: str, content: Any, size: int) -> None:
        self.blocks.append((self.step, kind, content), 320 + size)


T = TypeVar("T")


class Ring(Generic[T]):
    """The newest entries that fit into so many bytes, with their sizes. Numbers go on counting when old entries have
    gone, so a reader sees what it missed."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: deque[tuple[T, int]] = deque()
        self.num_bytes = 0
        # of the entry that will be appended next
        self.next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_number(self) -> int:
        """Of the oldest entry that is still there."""
        return self.next_number - len(self._entries)

    def append(self, entry: T, size: int) -> None:
        self._entries.append((entry, size))
        self.next_number += 1
        self.num_bytes += size
        while self.num_bytes > self._most_bytes:
            self.num_bytes -= self._entries.popleft()[1]

    def since(self, number: int, limit: int) -> list[T]:
        """Entries from `number` on, oldest first, at most `limit`."""
        start = min(max(0, number - self.first_number), len(self._entries))
        end = min(start + max(0, limit), len(self._entries))
        # a deque is walked from the nearer of its ends; whoever follows the newest must not pass all that is older
        if start > len(self._entries) - end:
            newest_first = islice(reversed(self._entries), len(self._entries) - end, len(self._entries) - start)
            return [entry for entry, _ in newest_first][::-1]
        return [entry for entry, _ in islice(self._entries, start, end)]

    def last(self, count: int) -> list[T]:
        return self.since(self.next_number - count, count)

"""Rules about what a step decides, checked when the executor gets it and before anything of it is done."""

from __future__ import annotations

from collections import Counter

import numpy as np

from quire.engine_core.block_table import NO_BLOCK
from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.messages import IntArray, SchedulerOutput, split_sequence_id
from quire.testing.core import CoreUnderTest


class DecisionChecks:
    """Watches a core's decisions; counts what they bring about."""

    def __init__(self, core: CoreUnderTest) -> None:
        self.counts: Counter[str] = Counter()
        self._core = core
        self._has_windows = any(group.sliding_window for group in core.manager.groups)
        self._num_passed: dict[int, int] = {}
        # requests that are preempted, and the length that each had when it came back the last time
        self._preempted: dict[int, Request] = {}
        self._length_at_resume: dict[int, int] = {}
        self._pinned: frozenset[int] = frozenset()
        # how many sequences each request had when the last step was sent
        self._num_sequences: dict[int, int] = {}
        # requests that have had their place, some without a token; those that have lost their rows, and sequences that
        # the last step computes
        self._started: set[int] = set()
        self._displaced: set[int] = set()
        self._in_flight: IntArray = np.zeros(0, dtype=np.int64)
        # columns that the last step was sent with, and what they were
        self._sent: list[tuple[IntArray, bytes]] = []
        self._num_forks: Counter[int] = Counter()
        core.executor.observers.append(self._check)
        core.executor.write_observers.append(self._check_writers)

    def is_in_flight(self, request_id: int) -> bool:
        """Whether a step that computes it has been decided, and its results may not be here."""
        return any(split_sequence_id(one)[0] == request_id for one in self._in_flight.tolist())

    def _check(self, output: SchedulerOutput) -> None:
        if self._core.is_async:
            self._check_messages(output)
        self._check_budget(output)
        self._check_preemptions(output)
        self._count(output)
        self._in_flight = self._core.rows.sequence_id[output.rows]

    def _check_messages(self, output: SchedulerOutput) -> None:
        """A worker may read a step's columns while the next step is decided."""
        assert all(column.tobytes() == content for column, content in self._sent), "a step in flight was changed"
        moves = (output.block_writes, output.block_copies, output.swapped_out, output.swapped_in)
        columns = (output.rows, output.num_tokens, *moves, *output.step_data.values())
        self._sent = [(one, one.tobytes()) for one in columns if isinstance(one, np.ndarray) and one.size]

    def _check_budget(self, output: SchedulerOutput) -> None:
        """I7: what a step grants, and how many sequences it may have."""
        assert output.num_scheduled_tokens <= self._core.scheduler.max_num_batched_tokens, "over the budget"
        rows = self._core.rows
        assert len(output.rows) <= rows.num_rows, "more rows than there are"
        is_beyond = rows.num_computed[output.rows] >= rows.max_total[output.rows]
        assert not np.count_nonzero(is_beyond), "the last token of a sequence is not computed, and nothing is behind it"

    def _check_writers(self, rows: IntArray, starts: IntArray, ends: IntArray) -> None:
        """I4: a block has one writer, and while it is not full, or drafts are in it, nobody else holds it."""
        block_size, counts, worker = self._core.manager.block_size, self._core.pool.counts, self._core.executor.rows
        sure_ends = np.minimum(ends, worker.num_total[rows] - worker.num_drafts[rows])
        written: list[int] = []
        for row, start, end, sure_end in zip(*(each.tolist() for each in (rows, starts, ends, sure_ends)), strict=True):
            sequence = self._core.scheduler.running.sequence_at(row)
            first, last = start // block_size, (end - 1) // block_size
            first_open = max(first, sure_end // block_size)
            for group, table in zip(self._core.manager.groups, sequence.block_tables, strict=True):
                is_state = group.num_state_blocks > 0
                blocks = table.blocks[0 if is_state else first : group.num_state_blocks or last + 1].tolist()
                written += blocks
                for block in blocks if is_state else blocks[first_open - first :]:
                    assert counts[block] == 1, f"row {row} writes into block {block}, which is shared"
        assert NO_BLOCK not in written, "a block that a window has passed is written"
        assert len(set(written)) == len(written), "two rows write into one block"

    def _check_preemptions(self, output: SchedulerOutput) -> None:
        """I18: who comes back gets on by a block before it gives way again, and nothing overtakes who is out."""
        scheduler = self._core.scheduler
        self._forget_what_a_pin_took()
        out, requests = Status.PREEMPTED, scheduler.lifecycle.requests
        preempted = {number: one for number, one in requests.items() if one.status is out}
        for number, request in preempted.items():
            if self._preempted.get(number) is not request:
                self._check_victim(request)
                self.counts["preempted in flight"] += self._core.is_async and self.is_in_flight(number)
        for number, request in self._preempted.items():
            if number not in preempted and request.status is Status.RUNNING:
                if request.is_final:  # one whose input is still open may give way again at once
                    self._length_at_resume[request.arrival] = request.longest
                self.counts["requests resumed"] += 1
        self._preempted = preempted
        self._num_sequences = {one.arrival: len(one.sequences) for one in requests.values()}
        self._count_displaced(preempted)
        # When it gets its place, it overtakes: its first token may come in a later step, or after it has given way.
        newcomers = [one for one in scheduler.running.requests if one.arrival not in self._started]
        self._started.update(one.arrival for one in (*newcomers, *preempted.values()))
        for newcomer in newcomers if preempted else ():
            overtaken = [
                number
                for number, one in preempted.items()
                if one.priority <= newcomer.priority and not one.waits_for_input
            ]
            assert not overtaken, f"request {newcomer.request_id} starts while {overtaken} are preempted"
        self._check_order(newcomers)

    def _forget_what_a_pin_took(self) -> None:
        """Who came back did so on blocks that could be had then; whoever pins some of them takes them from all."""
        pinned = self._core.manager.kept.pinned_blocks
        if pinned - self._pinned:
            self._length_at_resume.clear()
        self._pinned = pinned

    def _check_order(self, newcomers: list[Request]) -> None:
        """Who starts has overtaken nobody who is more important; first in, first out also nobody who came earlier."""
        policy = self._core.scheduler.policy
        if not newcomers or not (policy.is_preemptive or type(policy) is Fifo):
            return
        requests = self._core.scheduler.lifecycle.requests.values()
        waiting = [one for one in requests if one.status is Status.WAITING and one.num_prompt_tokens]
        for newcomer in newcomers:
            if policy.is_preemptive:
                overtaken = [one.request_id for one in waiting if one.priority < newcomer.priority]
            else:
                # one of which nothing had come when it was added stands behind those that came meanwhile
                as_important = [one for one in waiting if one.priority <= newcomer.priority and not _was_silent(one)]
                overtaken = [one.request_id for one in as_important if one.arrival < newcomer.arrival]
            assert not overtaken, f"request {newcomer.request_id} starts before {overtaken}"

    def _count_displaced(self, preempted: dict[int, Request]) -> None:
        displaced = {one.arrival for one in preempted.values() if not one.holds_rows}
        self.counts["rows given away"] += len(displaced - self._displaced)
        self._displaced = displaced

    def _check_victim(self, request: Request) -> None:
        resumed_at = self._length_at_resume.pop(request.arrival, None)
        # It may have been the longest that ended, with results that came after the request had given way.
        has_lost_one = len(request.sequences) < self._num_sequences.get(request.arrival, 0)
        if resumed_at is not None and request.is_final and not has_lost_one:
            progress = request.longest - resumed_at
            assert progress >= self._core.manager.block_size, f"request {request.request_id} gave way after {progress}"

    def _count(self, output: SchedulerOutput) -> None:
        for fork in output.forked:
            # a child may have been given up before its fork was sent
            child = self._core.scheduler.running.find(fork.row)
            if child is not None and child.request.message.decoding is not None:
                self.counts["beams forked"] += 1
                self._num_forks[child.request.arrival] += 1
                # the others took the place of a beam that had no continuation
                self.counts["beams dropped"] += self._num_forks[child.request.arrival] >= child.request.num_sequences
        if self._has_windows:
            self._count_passed()

    def _count_passed(self) -> None:
        """Blocks that windows have left behind: their entries are -1."""
        now = {
            sequence.sequence_id: sum(table.blocks.tolist().count(NO_BLOCK) for table in sequence.block_tables)
            for sequence in self._core.scheduler.running.living_sequences()
        }
        self.counts["blocks freed by a window"] += sum(
            max(0, count - self._num_passed.get(number, 0)) for number, count in now.items()
        )
        self._num_passed = now


def _was_silent(request: Request) -> bool:
    return not request.message.prompt_token_ids and not request.message.is_final

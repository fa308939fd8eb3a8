"""Rules about what a step decides, checked when the executor gets it and before anything of it is done."""

from __future__ import annotations

from collections import Counter

from quire.engine_core.block_table import NO_BLOCK
from quire.engine_core.request import Request, Status
from quire.messages import SchedulerOutput
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
        self._num_forks: Counter[int] = Counter()
        core.executor.observers.append(self._check)

    def _check(self, output: SchedulerOutput) -> None:
        self._check_budget(output)
        self._check_writers(output)
        self._check_preemptions(output)
        self._count(output)

    def _check_budget(self, output: SchedulerOutput) -> None:
        """I7: what a step grants, and how many sequences it may have."""
        assert output.num_scheduled_tokens <= self._core.scheduler.max_num_batched_tokens, "over the budget"
        assert len(output.rows) <= self._core.rows.num_rows, "more rows than there are"

    def _check_writers(self, output: SchedulerOutput) -> None:
        """I4: a block has one writer, and while it is not full nobody else holds it."""
        block_size, counts = self._core.manager.block_size, self._core.pool.counts
        written: list[int] = []
        for row, num_tokens in zip(output.rows.tolist(), output.num_tokens.tolist(), strict=True):
            sequence = self._core.scheduler.running.sequence_at(row)
            end = sequence.num_computed_tokens
            first, last = (end - num_tokens) // block_size, (end - 1) // block_size
            for table in sequence.block_tables:
                blocks = table.blocks[first : last + 1].tolist()
                written += blocks
                is_full = end % block_size == 0
                assert is_full or counts[blocks[-1]] == 1, f"row {row} writes into block {blocks[-1]}, which is shared"
        assert NO_BLOCK not in written, "a block that a window has passed is written"
        assert len(set(written)) == len(written), "two rows write into one block"

    def _check_preemptions(self, output: SchedulerOutput) -> None:
        """I18: who comes back gets on by a block before it gives way again, and nothing overtakes who is out."""
        scheduler = self._core.scheduler
        preempted = {number: one for number, one in scheduler.lifecycle.requests.items() if _is_out(one)}
        for number, request in preempted.items():
            if self._preempted.get(number) is not request:
                self._check_victim(request)
        for number, request in self._preempted.items():
            if number not in preempted and request.status is Status.RUNNING:
                if request.is_final:  # one whose input is still open may give way again at once
                    self._length_at_resume[request.arrival] = request.longest
                self.counts["requests resumed"] += 1
        self._preempted = preempted
        for admitted in output.admitted if preempted else ():
            newcomer = scheduler.running.sequence_at(admitted.row).request
            overtaken = [
                number for number, one in preempted.items() if one.priority <= newcomer.priority and not one.is_idle
            ]
            assert not overtaken, f"request {newcomer.request_id} starts while {overtaken} are preempted"

    def _check_victim(self, request: Request) -> None:
        resumed_at = self._length_at_resume.pop(request.arrival, None)
        if resumed_at is not None and request.is_final:
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
            sequence.sequence_id: sum(int((table.blocks == NO_BLOCK).sum()) for table in sequence.block_tables)
            for sequence in self._core.scheduler.running.living_sequences()
        }
        self.counts["blocks freed by a window"] += sum(
            max(0, count - self._num_passed.get(number, 0)) for number, count in now.items()
        )
        self._num_passed = now


def _is_out(request: Request) -> bool:
    return request.status is Status.PREEMPTED

"""The numbers of the rows after each step (4.4.2), held against those of the simulated worker and against the plans."""

from __future__ import annotations

import numpy as np

from quire.engine_core.block_table import NO_BLOCK
from quire.engine_core.request import Status
from quire.messages import IntArray, SchedulerOutput
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.plans import Plan

# Comparing every token with every plan takes as long as a step.
_STEPS_BETWEEN_READINGS = 16


class NumberChecks:
    """What the core believes of its rows is true, or an upper bound while a step is in flight."""

    def __init__(self, core: CoreUnderTest) -> None:
        self._core = core
        self._rows: IntArray = np.zeros(0, dtype=np.int64)
        self._sequence_ids: IntArray = np.zeros(0, dtype=np.int64)
        core.executor.observers.append(self._remember)

    def _remember(self, output: SchedulerOutput) -> None:
        self._rows = output.rows
        self._sequence_ids = self._core.rows.sequence_id[output.rows]

    def check(self, plans: dict[int, Plan]) -> None:
        if len(self._rows):
            self._check_numbers()
        self._rows = self._rows[:0]  # the next step may decide nothing
        self._sequence_ids = self._sequence_ids[:0]
        self._check_names()
        if self._core.executor.work.num_steps % _STEPS_BETWEEN_READINGS == 0:
            self._check_contents(plans)

    def _check_numbers(self) -> None:
        """Of the rows that the step computes, unless they have ended meanwhile, or the core chooses their tokens."""
        rows, worker = self._core.rows, self._core.executor.rows
        is_there = rows.sequence_id[self._rows] == self._sequence_ids
        of_step = self._rows[is_there & (worker.num_candidates[self._rows] == 0)]
        computed, there = rows.num_computed[of_step], worker.num_computed[of_step]
        if self._core.is_async:
            is_wrong = computed < there
            if self._core.scheduler.most_tokens > 1:
                # a step of several tokens may have brought more than it was taken for, within the last block
                size = self._core.manager.block_size
                is_wrong &= (there - 1) // size > (computed - 1) // size
        else:
            is_wrong = computed != there
            total, total_there = rows.num_total[of_step], worker.num_total[of_step]
            is_other = total != total_there
            assert not np.count_nonzero(is_other), f"rows {of_step}: tokens {total}, but the worker {total_there}"
        assert not np.count_nonzero(is_wrong), f"rows {of_step}: computed {computed}, but the worker {there}"

    def _check_names(self) -> None:
        """I3: a block is found by its content, so every token of it must be known."""
        block_size = self._core.manager.block_size
        for sequence in self._core.scheduler.running.living_sequences():
            num_named = sequence.num_named_blocks * block_size
            assert num_named <= sequence.num_known_tokens, f"row {sequence.row}: a block is named before it is known"
            if sequence.request.status is Status.PREEMPTED and not sequence.host_tables:
                assert sequence.num_computed_tokens == 0, f"row {sequence.row}: computed, but nowhere"

    def _check_contents(self, plans: dict[int, Plan]) -> None:
        """I6: what the core knows is what the model has said. I3: blocks have the names of their tokens."""
        for sequence in self._core.scheduler.running.living_sequences():
            request = sequence.request
            known = sequence.token_ids(0, sequence.num_known_tokens)
            if request.message.decoding is None:
                plan = plans[request.request_id]
                output = [*plan.given, *plan.outcomes[sequence.index].tokens] if request.is_final else []
                expected = [*plan.prompt, *output]
                assert known.tolist() == expected[: len(known)], f"row {sequence.row}: other tokens than the model's"
            hasher, pool = self._core.manager.cache.hasher, self._core.pool
            if not pool.keeps_contents and request.message.continues is not None:
                continue  # they have the names that they had for the request before it
            num_public = request.num_public_blocks * hasher.block_size if request.scope else len(known)
            contents = [hasher.media_content(request, index) for index in range(len(known) // hasher.block_size)]
            names = hasher.chain(hasher.root(request.content_key), known[:num_public], contents)
            if request.scope:
                parent = names[-1] if names else hasher.root(request.content_key)
                names += hasher.chain(hasher.digest(parent + request.scope), known[num_public:], contents[len(names) :])
            for group, table in enumerate(sequence.block_tables):
                for index, block in enumerate(table.blocks.tolist()):
                    key = pool.key_of(block) if block != NO_BLOCK else None
                    if key is not None:
                        assert index < len(names), f"row {sequence.row}: block {index} is named before it is known"
                        assert key == (group, names[index]), f"row {sequence.row}: block {index} has another's name"

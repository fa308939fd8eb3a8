"""Limits on a grant as objects: those that options switch on, and one that comes from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quire.engine_core.request import Request
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.constraints import AdapterSlots, ChunkAlignment, Constraint, LongPrefill
from quire.messages import IntArray, SchedulerOutput
from quire.testing.core import CoreUnderTest, loaded_adapters


def grants_until_first_token(core: CoreUnderTest, request_id: int) -> list[int]:
    grants: list[int] = []
    core.executor.observers.append(lambda output: grants.extend(output.num_tokens[output.rows == 0].tolist()))
    while not core.tokens[request_id << 10]:
        core.step()
    return grants


def test_a_long_prompt_gets_no_more_than_the_threshold() -> None:
    core = CoreUnderTest(budget=64, constraints=[LongPrefill(10)])
    core.add(0, list(range(35)), max_tokens=2)
    assert grants_until_first_token(core, 0) == [10, 10, 10, 5]


def test_what_the_threshold_leaves_goes_to_others() -> None:
    core = CoreUnderTest(budget=12, constraints=[LongPrefill(8)])
    core.add(0, list(range(16)), max_tokens=1)
    core.add(1, [41, 42, 43, 44], max_tokens=1)
    core.step()
    assert core.tokens[1 << 10], "the short one is done in the first step"


def test_chunks_end_at_multiples() -> None:
    core = CoreUnderTest(budget=14, block_size=4, constraints=[ChunkAlignment(4)])
    core.add(0, list(range(35)), max_tokens=1)
    assert grants_until_first_token(core, 0) == [12, 12, 11]


def test_a_unit_that_exceeds_the_budget_does_not_stand_still() -> None:
    core = CoreUnderTest(budget=3, constraints=[ChunkAlignment(16)])
    core.add(0, list(range(10)), max_tokens=1)
    core.run()
    assert core.ends[0].finish_reason == "length"


@dataclass(frozen=True)
class EncoderBudget(Constraint):
    """Of a prompt's even tokens, which something dear must encode first, a step has room for so many."""

    per_step: int

    def reason_to_refuse(self, request: Request) -> str | None:
        (sequence,) = request.sequences.values()
        num_even = int((sequence.token_ids(0, request.num_prompt_tokens) % 2 == 0).sum())
        return f"{num_even} tokens to encode, at most 8 are allowed." if num_even > 8 else None

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        left, most = self.per_step, num_tokens.copy()
        for i, (one, wanted) in enumerate(zip(row.tolist(), num_tokens.tolist(), strict=True)):
            start = int(rows.num_computed[one])
            is_even = rows.tokens[one, start : start + wanted] % 2 == 0
            fitting = int((np.cumsum(is_even) <= left).sum())
            left -= int(is_even[:fitting].sum())
            most[i] = fitting
        return most


def test_a_limit_from_outside_plugs_in() -> None:
    core = CoreUnderTest(budget=64, constraints=[EncoderBudget(2)])
    core.add(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    core.add(1, [2, 4, 6, 8] * 3, max_tokens=1)
    assert "at most 8" in (core.step().ends[0].error or "")
    core.run()
    assert core.ends[0].finish_reason == "length"


def test_its_chunks_are_those_of_its_budget() -> None:
    core = CoreUnderTest(budget=64, constraints=[EncoderBudget(2)])
    core.add(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    assert grants_until_first_token(core, 0) == [5, 4]


def test_a_limit_on_the_sum_holds_for_those_who_begin_too() -> None:
    core = CoreUnderTest(budget=64, constraints=[EncoderBudget(2)])
    evens: list[int] = []

    def count(output: SchedulerOutput) -> None:
        prompts = (core.scheduler.rows.tokens[row] for row in output.rows.tolist())
        ends = core.scheduler.rows.num_computed[output.rows]
        spans = zip(prompts, (ends - output.num_tokens).tolist(), ends.tolist(), strict=True)
        evens.append(sum(int((tokens[start:end] % 2 == 0).sum()) for tokens, start, end in spans))

    core.executor.observers.append(count)
    for number in range(3):
        core.add(number, [1, 2, 4, 6, 8], max_tokens=1, request={"cache_salt": str(number)})
    core.run()
    assert max(evens) <= 2
    assert {end.finish_reason for end in core.ends.values()} == {"length"}


def test_chunks_are_aligned_behind_a_hit() -> None:
    core = CoreUnderTest(budget=10, block_size=4, constraints=[ChunkAlignment(8)])
    core.add(0, list(range(5)), max_tokens=1)
    core.run()
    core.add(1, list(range(30)), max_tokens=1)
    assert grants_until_first_token(core, 1) == [4, 8, 8, 6]
    assert core.cached[1 << 10] == 4


class Adapters:
    """A core with so many slots; which adapters each step has, and that there are never more than slots."""

    def __init__(self, num_slots: int, **options: Any) -> None:
        self.core = CoreUnderTest(constraints=[AdapterSlots(num_slots)], adapters=loaded_adapters(8), **options)
        self.steps: list[set[int]] = []
        self.first_grant: dict[int, int] = {}
        self._num_slots = num_slots
        self.core.executor.observers.append(self._see)

    def _see(self, output: SchedulerOutput) -> None:
        rows = self.core.core.scheduler.rows
        used = set(rows.adapter[output.rows].tolist()) - {0}
        assert len(used) <= self._num_slots
        self.steps.append(used)
        for sequence_id in rows.sequence_id[output.rows].tolist():
            self.first_grant.setdefault(sequence_id >> 10, len(self.steps))

    def add(self, request_id: int, adapter: int, **sampling: Any) -> None:
        self.core.add(request_id, [1, 2, 3, request_id % 40], request={"adapter": adapter}, **sampling)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "two_level"])
def test_a_step_has_no_more_adapters_than_slots_and_all_of_them_end(policy: str, is_async: bool) -> None:
    adapters = Adapters(2, is_async=is_async, policy=policy, budget=11, num_blocks=20, max_num_seqs=6)
    for request_id in range(24):
        adapters.add(request_id, request_id % 7, max_tokens=5 + request_id % 3)
    adapters.core.run()
    assert all(end.finish_reason == "length" for end in adapters.core.ends.values())
    assert len(adapters.core.ends) == 24


def test_nobody_waits_for_ever_behind_those_that_came_later() -> None:
    """One slot; requests of adapter 1 never stop coming. The one of adapter 2 has its turn when those before it end."""
    adapters = Adapters(1)
    adapters.add(0, 1, max_tokens=10)
    adapters.core.step()
    adapters.add(1, 2, max_tokens=3)
    for request_id in range(2, 40):
        adapters.add(request_id, 1, max_tokens=10)
        adapters.core.step()
    adapters.core.run()
    assert adapters.first_grant[1] <= 13
    assert {2} in adapters.steps


def test_base_requests_pass_those_that_wait_for_a_slot() -> None:
    adapters = Adapters(1)
    adapters.add(0, 1, max_tokens=20)
    adapters.add(1, 2, max_tokens=20)
    adapters.add(2, 0, max_tokens=2)
    adapters.core.step()
    assert 2 in adapters.first_grant
    assert 1 not in adapters.first_grant


def test_blocks_are_not_shared_between_adapters() -> None:
    core = CoreUnderTest(block_size=4, adapters=loaded_adapters(2))
    prompt = list(range(20))
    cached: list[int] = []
    for request_id, adapter in enumerate([0, 1, 2, 1, 0]):
        core.add(request_id, prompt, request={"adapter": adapter}, max_tokens=2)
        core.run()
        cached.append(core.cached[request_id << 10])
    assert cached == [0, 0, 0, 16, 16]

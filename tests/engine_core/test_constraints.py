"""Limits on a grant as objects: those that options switch on, and one that comes from outside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.engine_core.request import Request
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.constraints import ChunkAlignment, Constraint, LongPrefill
from quire.messages import IntArray, SchedulerOutput
from quire.testing.core import CoreUnderTest


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

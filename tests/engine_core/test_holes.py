"""Rows that fail write nothing. What a failed row was to write must not be read later, whatever happened in between."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.request import Status
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.constraints import Constraint
from quire.engine_core.scheduler.step_budget import StepBudget
from quire.messages import ExtendRequest, IntArray, SchedulerOutput, sequence_id_of
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.executor import READS_HOLE

FIRST, SECOND, THIRD = (sequence_id_of(number, 0) for number in (1, 2, 3))
LONG = list(range(1, 33))


def fail_in_step(core: CoreUnderTest, step: int, row: int) -> None:
    def observe(decided: SchedulerOutput) -> None:
        if decided.step == step:
            core.executor.failing_rows[row] = "a failure"

    core.executor.observers.append(observe)


def test_who_found_it_in_the_same_step_fails_as_well() -> None:
    core = CoreUnderTest()
    core.add(1, LONG, max_tokens=2)
    core.add(2, [*LONG, 40], max_tokens=2)
    fail_in_step(core, 1, row=0)
    core.run()
    assert core.ends[FIRST].error == "a failure"
    assert core.ends[SECOND].error == READS_HOLE
    core.add(3, [*LONG, 41], max_tokens=2)
    core.run()
    assert (core.cached[THIRD], core.ends[THIRD].finish_reason) == (0, "length")


def test_the_simulator_knows_a_hole_that_no_worker_would_notice_any_more() -> None:
    """What is too old for a worker to remember is the core's own mistake."""
    core = CoreUnderTest()
    core.add(1, LONG, max_tokens=2)
    fail_in_step(core, 1, row=0)
    core.manager.forget = lambda sequence: None  # type: ignore[method-assign]
    core.run()
    core.add(2, [40, 41], max_tokens=3)
    core.run()
    core.add(3, [*LONG, 41], max_tokens=2)
    with pytest.raises(AssertionError, match="wrong content"):
        core.run()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_prompt_that_gave_way_before_its_failure_was_known(mode: str) -> None:
    core = CoreUnderTest(num_blocks=8, is_async=True, block_size=4, preemption_mode=mode, num_host_blocks=8)
    core.add(1, [1] * 9, max_tokens=13)
    for _ in range(7):
        core.step()
    prompt = [2] * 12
    core.add(2, prompt, max_tokens=4)

    def observe(decided: SchedulerOutput) -> None:
        for one in decided.admitted:
            core.executor.failing_rows[one.row] = "a failure"
            core.executor.observers.remove(observe)

    core.executor.observers.append(observe)
    while SECOND not in core.ends:
        core.step()
    assert core.core.statistics()["num_preemptions_total"] == 1, "this test needs that the second one gives way"
    assert core.ends[SECOND].error == "a failure"
    core.run()
    core.add(4, [30], max_tokens=2)
    core.run()
    core.add(3, [*prompt, 3], max_tokens=3)
    core.run()
    assert core.tokens[THIRD] == expected_tokens([*prompt, 3], 3, vocab_size=50)


def test_blocks_that_a_window_passed_before_the_failure_was_known() -> None:
    core = CoreUnderTest(num_blocks=40, block_size=2, budget=16, groups=[KVGroup(("layer",), 4)], is_async=True)
    core.add(1, LONG, max_tokens=4)
    fail_in_step(core, 1, row=0)
    core.run()
    assert core.ends[FIRST].error == "a failure"
    core.add(2, [40, 41], max_tokens=3)
    core.run()
    core.add(3, [*LONG[:12], 45], max_tokens=3)
    core.run()
    assert core.tokens[THIRD] == expected_tokens([*LONG[:12], 45], 3, vocab_size=50)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_kept_ends_before_the_steps_that_may_still_fail(is_async: bool) -> None:
    """A stop token may be computed already, in a step whose results are not there when its sequence ends."""
    prompt = [5, 6, 7, 8, 9]
    tokens = expected_tokens(prompt, 4, vocab_size=50)
    core = CoreUnderTest(is_async=is_async)
    core.add(1, prompt, max_tokens=20, stop_token_ids=[tokens[-1]], request={"keep": "h"})
    fail_in_step(core, 5, row=0)
    core.run()
    assert core.tokens[FIRST] == tokens
    kept = core.manager.kept.find("h")
    assert kept is not None
    assert (len(kept.tokens), kept.num_computed_tokens) == (9, 8)
    core.add(3, [40] * 3, max_tokens=6)
    core.run()
    core.add(2, [11, 12], max_tokens=4, request={"continues": "h"})
    core.run()
    assert core.cached[SECOND] == 8
    assert core.tokens[SECOND] == expected_tokens([*prompt, *tokens, 11, 12], 4, vocab_size=50)


def test_what_began_in_blocks_that_are_still_to_be_written_is_not_kept_as_computed() -> None:
    """Its client ends it (a stop string, say) before it is known that who was to write them has failed."""
    core = CoreUnderTest(is_async=True)
    fail_in_step(core, 1, row=0)
    core.add(1, LONG, max_tokens=2)
    core.add(2, [*LONG, 40], max_tokens=8, request={"keep": "h"})
    core.step()
    core.scheduler.abort([], [SECOND])
    kept = core.manager.kept.find("h")
    assert kept is not None
    assert kept.num_computed_tokens == 0
    core.run()
    core.add(4, [45, 46], max_tokens=3)
    core.run()
    core.add(3, [41, 42], max_tokens=3, request={"continues": "h"})
    core.run()
    assert core.tokens[THIRD] == expected_tokens([*LONG, 40, 41, 42], 3, vocab_size=50)


def gives_way_as_a_step_is_decided(core: CoreUnderTest, request_id: int) -> None:
    opened, admission_control = core.scheduler.admission_control.begin_step, core.scheduler.admission_control

    def open_once(step: int, *, has_results_to_come: bool) -> None:
        admission_control.begin_step = opened  # type: ignore[method-assign]
        opened(step, has_results_to_come=has_results_to_come)
        admission_control.preempt(core.scheduler.lifecycle.requests[request_id], "somebody needed its blocks")

    admission_control.begin_step = open_once  # type: ignore[method-assign]


def fail_who_is_admitted(core: CoreUnderTest, request_id: int) -> None:
    def observe(decided: SchedulerOutput) -> None:
        rows = [one.row for one in decided.admitted if one.sequence_id == sequence_id_of(request_id, 0)]
        core.executor.failing_rows.update(dict.fromkeys(rows, "a failure"))

    core.executor.observers.append(observe)


def test_what_comes_back_from_swap_space_is_not_kept_with_blocks_that_are_still_to_be_written() -> None:
    core = CoreUnderTest(num_blocks=20, num_host_blocks=20, preemption_mode="swap", is_async=True)
    prompt = LONG[:12]
    fail_who_is_admitted(core, 2)
    core.add(1, prompt, max_tokens=20, request={"keep": "h"})
    for _ in range(4):
        core.step()
    gives_way_as_a_step_is_decided(core, 1)
    core.step()
    core.core.control("reset_prefix_cache", {})
    core.add(2, [*prompt, 5], max_tokens=4, request={"priority": -1})
    while core.scheduler.lifecycle.requests[1].is_swapped:
        core.step()
    core.scheduler.abort([], [FIRST])
    core.run()
    assert core.ends[SECOND].error == "a failure"
    core.add(4, [45, 46], max_tokens=3)
    core.run()
    core.add(3, [41, 42], max_tokens=3, request={"continues": "h"})
    core.run()
    assert core.cached[THIRD] >= 12
    assert core.tokens[THIRD] == expected_tokens([*prompt, *core.tokens[FIRST], 41, 42], 3, vocab_size=50)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_output_that_comes_back_and_waits_holds_no_block_that_is_still_to_be_written(is_async: bool) -> None:
    """The budget is for the other one, so it would read the block too late to notice that the writer has failed."""
    core = CoreUnderTest(num_blocks=40, num_host_blocks=40, preemption_mode="swap", is_async=is_async, max_num_seqs=4)
    core.add(1, LONG[:3], n=2, max_tokens=24, temperature=1.0, seed=3)
    for _ in range(14):
        core.step()
    second = core.scheduler.lifecycle.requests[1].sequences[1]
    tokens = second.token_ids(0, second.num_known_tokens).tolist()
    if is_async:
        gives_way_as_a_step_is_decided(core, 1)
        core.step()
    else:
        core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[1], "somebody needed its blocks")
    core.core.control("reset_prefix_cache", {})
    fail_who_is_admitted(core, 2)
    core.add(2, tokens[:16], max_tokens=4, request={"priority": -1})
    core.scheduler.budget = StepBudget(17)
    core.step()
    core.scheduler.budget = StepBudget(1)
    for _ in range(8):
        core.step()
    core.scheduler.budget = StepBudget(64)
    core.run()
    assert core.ends[SECOND].error == "a failure"
    assert {core.ends[sequence_id_of(1, index)].finish_reason for index in range(2)} == {"length"}


class NotNow(Constraint):
    """Grants nothing to one sequence, for a while."""

    def __init__(self, blocked: int) -> None:
        self.blocked: int | None = blocked

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        return np.where(rows.sequence_id[row] == self.blocked, 0, num_tokens)


@pytest.mark.parametrize("is_async", [False, True])
def test_who_is_granted_nothing_has_not_begun(is_async: bool) -> None:
    limit = NotNow(SECOND)
    core = CoreUnderTest(is_async=is_async, constraints=[limit])
    fail_who_is_admitted(core, 1)
    for number in (1, 2):
        core.add(number, [*LONG[:12], number], max_tokens=4)
    core.add(4, [30], max_tokens=8)
    for _ in range(4):
        core.step()
    limit.blocked = None
    core.run()
    assert core.ends[FIRST].error == "a failure"
    assert core.ends[SECOND].finish_reason == "length"


def test_who_goes_out_again_before_it_was_brought_back_is_computed_again() -> None:
    """What lies in swap space goes with its host blocks, and the blocks that it was to come into are empty."""
    limit = NotNow(-1)
    core = CoreUnderTest(
        num_blocks=8,
        num_host_blocks=8,
        preemption_mode="swap",
        policy="priority",
        constraints=[limit],
        max_model_len=30,
    )
    core.add(1, LONG[:10], is_final=False, max_tokens=4, request={"priority": 5})
    core.step()
    stream = core.scheduler.lifecycle.requests[1]
    core.scheduler.admission_control.preempt(stream, "somebody needed its blocks")
    core.core.control("reset_prefix_cache", {})
    core.add(2, [30] * 5, max_tokens=2)
    while SECOND not in core.ends:
        core.step()
    core.core.control("reset_prefix_cache", {})
    core.poison_free_blocks()
    limit.blocked = FIRST
    core.core.extend(ExtendRequest(request_id=1, token_ids=[40, 41], is_final=False))
    core.step()
    assert not stream.is_swapped
    core.add(3, [45] * 24, max_tokens=2, request={"priority": 0})
    core.step()
    assert stream.status is Status.PREEMPTED
    limit.blocked = None
    core.core.extend(ExtendRequest(request_id=1, token_ids=[42], is_final=True))
    core.run()
    assert core.tokens[FIRST] == expected_tokens([*LONG[:10], 40, 41, 42], 4, vocab_size=50)


def test_a_start_that_fails_half_way_leaves_no_names() -> None:
    """Not expected: of two outputs that come back, the second finds no room though it was counted."""
    core = CoreUnderTest(num_blocks=40, preemption_mode="recompute")
    core.add(1, LONG[:12], n=2, max_tokens=24, temperature=1.0, seed=3)
    for _ in range(4):
        core.step()
    core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[1], "somebody needed its blocks")
    core.core.control("reset_prefix_cache", {})
    core.poison_free_blocks()
    allocate = core.manager.allocate_slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.manager, "allocate_slots", lambda one, *rest: not one.index and allocate(one, *rest))
        core.step()
    assert "more blocks are needed" in str(core.ends[FIRST].error)
    core.add(2, [*LONG[:12], 5], max_tokens=4)
    core.run()
    assert core.cached[SECOND] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_name_is_not_sure_before_the_results_of_its_step(is_async: bool) -> None:
    core = CoreUnderTest(is_async=is_async)
    core.add(1, LONG[:3], max_tokens=30)
    cache, looks = core.manager.cache, []

    def look(decided: SchedulerOutput) -> None:
        sequence = core.scheduler.running.sequence_at(0)
        num_settled = core.scheduler._in_flight.num_settled(sequence, core.rows)
        num_sure = sum(cache.find_computed(0, name) is not None for name in sequence.block_hashes)
        assert num_sure * 4 <= num_settled
        looks.append(len(sequence.block_hashes) - num_sure)

    core.executor.observers.append(look)
    core.run()
    assert len(looks) >= 30
    assert set(looks) == {0, 1}

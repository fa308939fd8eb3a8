"""Rows that fail write nothing. What a failed row was to write must not be read later, whatever happened in between."""

from __future__ import annotations

import pytest

from quire.engine_core.executor.checking_model import expected_tokens
from quire.engine_core.executor.simulated import READS_HOLE
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import SchedulerOutput, sequence_id_of
from quire.testing.core import CoreUnderTest

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

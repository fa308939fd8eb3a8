"""Corners of a request's life: each of them once ended badly."""

from __future__ import annotations

import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import AbortRequests, ExtendRequest, sequence_id_of
from quire.testing.core import CoreUnderTest

PROMPT = list(range(12))


def test_streamed_input_that_never_brought_a_token_ends_with_an_error() -> None:
    core = CoreUnderTest()
    core.add(1, [], is_final=False)
    core.step()
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=True))
    core.run()
    assert "the prompt is empty" in (core.ends[sequence_id_of(1, 0)].error or "")


def test_dropping_the_only_sequence_before_the_fork_ends_all_of_them() -> None:
    core = CoreUnderTest(budget=4)
    core.add(1, PROMPT, n=3, temperature=1.0)
    core.step()
    core.core.abort(AbortRequests(sequence_ids=[sequence_id_of(1, 0)]))
    core.run()
    assert sorted(core.ends) == [sequence_id_of(1, index) for index in range(3)]
    assert core.rows.num_free == core.rows.num_rows


def test_what_a_failed_row_computed_is_not_found_again() -> None:
    core = CoreUnderTest(block_size=4, budget=8)
    core.add(1, PROMPT, max_tokens=2)
    core.step()
    core.executor.failing_rows[0] = "the logits are not finite"
    core.run()
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "error"
    core.add(2, PROMPT, max_tokens=2)
    core.run()
    assert core.cached[sequence_id_of(2, 0)] == 0


def test_the_last_token_of_streamed_input_is_not_computed_into_a_shared_block() -> None:
    core = CoreUnderTest(block_size=4)
    core.add(1, PROMPT, is_final=False, max_tokens=3)
    core.step()
    core.add(2, [*PROMPT, 40], max_tokens=20)
    core.step()
    (shared,) = {sequence.block_tables[0][2] for sequence in core.scheduler.running.living_sequences()}
    assert core.pool.count(shared) == 2
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=True))
    core.step()
    assert core.manager.num_copied_blocks == 1
    assert core.pool.count(shared) == 1


def test_requests_that_arrive_together_compute_a_common_prefix_once() -> None:
    core = CoreUnderTest(block_size=4)
    for number in range(3):
        core.add(number, [*range(16), 30 + number], max_tokens=2)
    core.step()
    assert [core.cached[sequence_id_of(number, 0)] for number in range(3)] == [0, 16, 16]
    core.run()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_that_are_computed_again_share_what_they_have_in_common(prefix_caching: bool) -> None:
    core = CoreUnderTest(num_blocks=24, block_size=4, max_model_len=64, prefix_caching=prefix_caching)
    core.add(1, list(range(40)), n=4, max_tokens=8, temperature=1.0)
    for _ in range(3):
        core.step()
    request = core.scheduler.lifecycle.requests[1]
    core.scheduler._preempt(request, "a test")
    core.manager.reset_prefix_cache()
    assert core.pool.num_held == 0
    # ten blocks of the prompt once, and one for each of the four
    assert core.manager.estimates.blocks_to_come(request, 64) == 10 + 4
    core.step()
    assert core.pool.num_held == 10 + 4
    core.run()
    # the first computed all of its tokens again, the others only what follows the prompt
    assert core.scheduler.recovery.num_recomputed_tokens == 42 + 3 * 1


def test_a_hit_is_the_longest_prefix_that_every_group_can_serve() -> None:
    core = CoreUnderTest(block_size=4, groups=[KVGroup(("a",)), KVGroup(("b",), 6)], num_blocks=64)
    core.add(1, list(range(30)), max_tokens=2)
    core.run()
    core.add(2, [*range(18), 49, 48], max_tokens=2)
    core.run()
    # The window of group b reaches back over two blocks, which the first request has freed but the pool still knows.
    assert core.cached[sequence_id_of(2, 0)] == 16

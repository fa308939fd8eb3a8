"""Who only waits for input stands in nobody's way: not with blocks, and not with a row (4.4.4)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.admission_control import AdmissionControl
from quire.messages import ExtendRequest, sequence_id_of
from quire.testing.core import CoreUnderTest


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "two_level"])
def test_rows_of_open_prompts_are_lent(policy: str, is_async: bool) -> None:
    core = CoreUnderTest(max_num_seqs=2, policy=policy, is_async=is_async)
    plain = CoreUnderTest()
    for number in range(4):
        core.add(number, [10 + number, 2, 3, 4, 5], max_tokens=4, is_final=False)
        plain.add(number, [10 + number, 2, 3, 4, 5, 6], max_tokens=4)
    for _ in range(6):
        core.step()
    core.add(9, [1, 2, 3], max_tokens=6)
    plain.add(9, [1, 2, 3], max_tokens=6)
    core.run()
    assert core.ends[9 << 10].finish_reason == "length", "it did not wait for those who wait"
    for number in range(4):
        core.core.extend(ExtendRequest(request_id=number, token_ids=[6], is_final=True))
    core.run()
    plain.run()
    assert core.tokens == plain.tokens
    core.assert_empty()


def beside_an_idle_stream(num_tokens: int, **options: Any) -> CoreUnderTest:
    """An open prompt of so many tokens that waits for input, and somebody who runs on for long: 64 blocks of 4."""
    core = CoreUnderTest(num_blocks=64, max_model_len=256, max_num_seqs=8, **options)
    core.add(1, [7] * num_tokens, is_final=False, max_tokens=4)
    for _ in range(5):
        core.step()
    core.add(2, [8] * 4, max_tokens=90)
    core.step()
    return core


def steps_until_start(core: CoreUnderTest, request_id: int) -> int:
    for number in range(100):
        core.step()
        if sequence_id_of(request_id, 0) in core.cached:
            return number
    raise AssertionError("it did not start")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "two_level"])
def test_blocks_of_open_prompts_are_lent(
    policy: str, prefix_caching: bool, num_host_blocks: int, is_async: bool
) -> None:
    """Request 3 has no room beside the stream, though it is not the only one that runs."""
    core = beside_an_idle_stream(
        160, policy=policy, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks, is_async=is_async
    )
    core.add(3, [9] * 120, max_tokens=4)
    assert steps_until_start(core, 3) <= 1
    assert sequence_id_of(2, 0) not in core.ends
    core.core.extend(ExtendRequest(request_id=1, token_ids=[6], is_final=True))
    core.run()
    plain = CoreUnderTest(num_blocks=200, max_model_len=256)
    plain.add(1, [*[7] * 160, 6], max_tokens=4)
    plain.add(2, [8] * 4, max_tokens=90)
    plain.add(3, [9] * 120, max_tokens=4)
    plain.run()
    assert core.tokens == plain.tokens
    core.assert_empty()


def test_an_open_prompt_keeps_its_blocks_if_they_are_not_enough() -> None:
    core = beside_an_idle_stream(40)
    core.add(4, [5] * 8, max_tokens=90)
    core.add(3, [9] * 248, max_tokens=4)  # 63 blocks
    for _ in range(30):
        core.step()
    assert core.core.statistics()["num_preemptions_total"] == 0


def test_an_open_prompt_keeps_its_blocks_if_enough_are_free() -> None:
    core = beside_an_idle_stream(40)
    core.add(3, [9] * 120, max_tokens=4)
    assert steps_until_start(core, 3) == 0
    assert core.core.statistics()["num_preemptions_total"] == 0


def test_an_open_prompt_that_came_back_for_a_piece_may_wait_for_the_next_one() -> None:
    """Else each piece would have it computed again, while there is always somebody who waits."""
    core = beside_an_idle_stream(160, prefix_caching=False)
    core.add(3, [9] * 120, max_tokens=4)
    assert steps_until_start(core, 3) == 0
    core.core.extend(ExtendRequest(request_id=1, token_ids=[6], is_final=False))
    (stream,) = core.scheduler.lifecycle.open_inputs.values()
    while stream.status is not Status.RUNNING or not stream.waits_for_input:
        core.step()
    core.add(4, [5] * 120, max_tokens=4)
    for _ in range(4):
        core.step()
    assert core.core.statistics()["num_preemptions_total"] == 1
    assert stream.waits_for_input
    assert stream.status is Status.RUNNING
    assert sequence_id_of(4, 0) not in core.cached
    assert steps_until_start(core, 4) < 40, "in the end it does not wait for those who wait"
    assert sequence_id_of(2, 0) not in core.ends
    assert core.core.statistics()["num_preemptions_total"] == 2


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "two_level"])
def test_rows_are_lent_to_who_needs_more_than_are_free(policy: str, is_async: bool) -> None:
    core = CoreUnderTest(max_num_seqs=2, policy=policy, is_async=is_async)
    core.add(1, [1] * 10, is_final=False, max_tokens=4)
    for _ in range(4):
        core.step()
    core.add(2, [2] * 10, n=2, max_tokens=4)
    core.add(3, [3] * 10, max_tokens=4)
    core.run()
    assert {end >> 10 for end in core.ends} == {2, 3}
    core.core.extend(ExtendRequest(request_id=1, token_ids=[6], is_final=True))
    core.run()
    core.assert_empty()


def test_rows_are_lent_also_while_others_run() -> None:
    core = CoreUnderTest(max_num_seqs=3)
    core.add(1, [1] * 10, is_final=False, max_tokens=4)
    core.step()
    core.add(2, [2] * 10, max_tokens=100)
    core.step()
    core.add(3, [3] * 10, n=2, max_tokens=4)
    assert steps_until_start(core, 3) == 0


@pytest.mark.parametrize("num_tokens", [10, 110])
def test_rows_of_open_prompts_and_of_less_important_requests_add_up(num_tokens: int) -> None:
    """One row is the stream's, the other that of request 3, which gave way."""
    core = CoreUnderTest(num_blocks=64, max_model_len=256, max_num_seqs=2, policy="priority", prefix_caching=False)
    core.add(1, [1] * 10, is_final=False, max_tokens=4)
    core.add(3, [3] * 10, max_tokens=20, request={"priority": 2})
    for _ in range(4):
        core.step()
    core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[3], "asked for")
    core.add(2, [2] * num_tokens, n=2, max_tokens=4, request={"priority": 1})
    core.run()
    assert {end >> 10 for end in core.ends} == {2, 3}
    assert {end.finish_reason for end in core.ends.values()} == {"length"}


def test_rows_are_not_taken_in_vain() -> None:
    """Two streams have a row each; the third row is that of one who runs on, and request 9 needs three."""
    core = CoreUnderTest(max_num_seqs=3, num_blocks=200, max_model_len=400, prefix_caching=False)
    core.add(4, [4] * 10, max_tokens=200)
    for number in (1, 2):
        core.add(number, [number] * 100, is_final=False, max_tokens=4)
    for _ in range(12):
        core.step()
    core.add(9, [9] * 8, n=3, max_tokens=4)
    for _ in range(10):
        for number in (1, 2):
            core.core.extend(ExtendRequest(request_id=number, token_ids=[5], is_final=False))
        for _ in range(10):
            core.step()
    assert core.core.statistics()["num_preemptions_total"] == 0
    core.run()
    assert len(core.ends) == 1 + 3
    assert core.core.statistics()["num_preemptions_total"] == 2


@pytest.fixture
def shallow_stack() -> Iterator[None]:
    """A step needs few frames, however many streams there are."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    yield
    sys.setrecursionlimit(limit)


def many_streams(**options: Any) -> CoreUnderTest:
    """150 that wait for input with all that they were given."""
    core = CoreUnderTest(max_num_seqs=151, budget=800, max_model_len=640, check_invariants=False, **options)
    for number in range(150):
        core.add(1 + number, [1 + number % 40, number // 40 + 1], is_final=False, max_tokens=1)
    core.run()
    assert core.core.statistics()["num_requests_running"] == 150
    return core


@pytest.mark.usefixtures("shallow_stack")
def test_one_of_many_streams_makes_room_for_who_needs_a_row() -> None:
    core = many_streams(num_blocks=600)
    core.add(2000, [2] * 10, n=2, max_tokens=4)
    core.run()
    assert {end >> 10 for end in core.ends} == {2000}
    assert core.core.statistics()["num_preemptions_total"] == 1


@pytest.mark.usefixtures("shallow_stack")
def test_streams_that_came_back_for_a_piece_do_not_stay_when_nothing_runs() -> None:
    core = many_streams(num_blocks=158, prefix_caching=False)
    for request_id in (2000, 2001):
        core.add(request_id, [2] * 600, max_tokens=1)
        core.run()
        assert request_id << 10 in core.ends
        for number in range(150):
            core.core.extend(ExtendRequest(request_id=1 + number, token_ids=[3], is_final=False))
        core.run()
        assert all(stream.waits_for_input for stream in core.scheduler.lifecycle.open_inputs.values())


def test_who_loses_its_row_while_it_waits_for_input_goes_on_waiting() -> None:
    """Swapped out with all that came of its input, then displaced."""
    core = CoreUnderTest(max_num_seqs=2, num_host_blocks=64, preemption_mode="swap", prefix_caching=False)
    core.add(1, [1] * 10, is_final=False, max_tokens=4)
    core.run()
    stream = core.scheduler.lifecycle.requests[1]
    core.scheduler.admission_control.preempt(stream, "asked for")
    core.add(2, [2] * 10, n=2, max_tokens=4)
    core.run()
    assert {end >> 10 for end in core.ends} == {2}
    assert not stream.holds_rows
    assert stream.status is Status.PREEMPTED
    assert stream.waits_for_input


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_empty_piece_brings_nobody_back(mode: str) -> None:
    core = CoreUnderTest(num_host_blocks=64, preemption_mode=mode)
    core.add(1, list(range(20)), max_tokens=2, is_final=False)
    core.run()
    stream = core.scheduler.lifecycle.requests[1]
    core.scheduler.admission_control.preempt(stream, "somebody needed its blocks")
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=False))
    core.run()
    assert stream.parked_with == stream.num_prompt_tokens
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=True))
    core.run()
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "length"


def test_who_has_given_way_lends_its_row_before_who_still_has_blocks() -> None:
    core = CoreUnderTest(max_num_seqs=2)
    for number in (1, 2):
        core.add(number, [number] * 20, max_tokens=2, is_final=False)
    core.run()
    early, late = (core.scheduler.lifecycle.requests[number] for number in (1, 2))
    core.scheduler.admission_control.preempt(early, "somebody needed its blocks")
    core.add(3, [5] * 8, max_tokens=2)
    core.step()
    assert (early.holds_rows, late.holds_rows, late.status) == (False, True, Status.RUNNING)


@pytest.mark.parametrize("policy", ["fifo", "two_level"])
def test_a_step_looks_for_lenders_a_few_times_however_many_wait(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreUnderTest(max_num_seqs=4, num_blocks=1_000, budget=256, policy=policy)
    for number in range(60):
        core.add(number, [number % 50, 7, 8, 9], max_tokens=2, is_final=False)
    core.run()
    for number in range(100, 104):
        core.add(number, [1, 2, 3], max_tokens=100)
    core.step()
    assert not any(stream.holds_rows for stream in core.scheduler.lifecycle.open_inputs.values())
    for number in range(60):
        core.core.extend(ExtendRequest(request_id=number, token_ids=[5] * 6, is_final=False))
    looked_at: list[Request] = []
    lends = AdmissionControl._lends
    monkeypatch.setattr(
        AdmissionControl, "_lends", lambda one, request: looked_at.append(request) or lends(one, request)
    )
    core.step()
    assert len(looked_at) <= 4 * 60


def test_what_is_shared_with_who_lends_its_row_is_needed_as_well() -> None:
    """And then the blocks of another one, which would have sufficed before."""
    core = CoreUnderTest(max_num_seqs=2, num_blocks=40, max_model_len=150, budget=1_000)
    for number, length in ((1, 80), (2, 40)):
        core.add(number, [number] * length, is_final=False, max_tokens=4)
        core.run()
    core.add(3, [*[2] * 40, *[3] * 60], max_tokens=2)
    core.run()
    assert core.ends[3 << 10].finish_reason == "length"

"""Who only waits for input stands in nobody's way: not with blocks, and not with a row (4.4.4)."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine_core.request import Status
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
    (stream,) = core.scheduler.lifecycle.streams.values()
    while stream.status is not Status.RUNNING or not stream.is_idle:
        core.step()
    core.add(4, [5] * 120, max_tokens=4)
    for _ in range(4):
        core.step()
    assert core.core.statistics()["num_preemptions_total"] == 1
    assert stream.is_idle
    assert stream.status is Status.RUNNING
    assert sequence_id_of(4, 0) not in core.cached
    assert steps_until_start(core, 4) < 40, "in the end it does not wait for those who wait"
    assert sequence_id_of(2, 0) not in core.ends
    assert core.core.statistics()["num_preemptions_total"] == 2

"""Positions that are computed in one step: no grant, prefix or division ends in the middle of them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.scheduler.constraints import ChunkAlignment, LongPrefill
from quire.engine_core.whole_ranges import WholeRanges
from quire.messages import Media
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.workload import Workload


def whole(start: int, end: int, name: bytes = b"a") -> Media:
    return Media(
        start=start, length=end - start, pixels=b"", shape=[0], mean=[], std=[], grid=[1, 1, end - start], merge_size=1,
        content_hash=name, is_whole=True,
    )  # fmt: skip


def add(core: CoreUnderTest, number: int, length: int, media: list[Media], **sampling: Any) -> None:
    core.add(number, list(range(length)), request={"media": media}, **{"max_tokens": 3, **sampling})


def grants_of(core: CoreUnderTest, row: int = 0) -> list[int]:
    grants: list[int] = []
    core.executor.observers.append(lambda output: grants.extend(output.num_tokens[output.rows == row].tolist()))
    return grants


@pytest.mark.parametrize(
    ("end", "back"), [(0, 0), (3, 3), (4, 3), (6, 3), (7, 7), (8, 7), (9, 9), (10, 10), (11, 10), (30, 30)]
)
def test_an_end_goes_back_to_the_beginning_of_what_it_would_cut(end: int, back: int) -> None:
    assert WholeRanges([(3, 7), (7, 9), (10, 12)]).taken_back(end) == back


@pytest.mark.parametrize(("num_blocks", "left"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 4), (5, 5)])
def test_blocks_go_back_until_nothing_is_cut(num_blocks: int, left: int) -> None:
    """One range is taken back into the block that another one cuts."""
    assert WholeRanges([(5, 9), (9, 15)]).blocks_back(num_blocks, 4) == left


def test_a_grant_ends_before_a_range_that_does_not_fit() -> None:
    core = CoreUnderTest(budget=8)
    grants = grants_of(core)
    add(core, 0, 20, [whole(5, 12), whole(12, 18)])
    core.run()
    assert grants == [5, 7, 8, 1, 1]


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        ([LongPrefill(7)], [5, 7, 7, 1, 1, 1]),
        ([ChunkAlignment(4)], [5, 7, 8, 1, 1]),
        ([ChunkAlignment(16)], [5, 7, 8, 1, 1]),
    ],
)
def test_other_limits_cut_nothing_and_stand_nothing_still(constraints: list[Any], expected: list[int]) -> None:
    core = CoreUnderTest(budget=8, constraints=constraints)
    grants = grants_of(core)
    add(core, 0, 20, [whole(5, 12), whole(12, 18)])
    core.run()
    assert grants == expected


@pytest.mark.parametrize(
    ("constraints", "words"), [([], "max_num_batched_tokens=8"), ([LongPrefill(8)], "long_prefill_token_threshold=8")]
)
def test_what_never_fits_into_a_step_is_refused(constraints: list[Any], words: str) -> None:
    core = CoreUnderTest(budget=16 if constraints else 8, constraints=constraints)
    add(core, 0, 12, [whole(2, 11)])
    error = core.step().ends[0].error or ""
    assert error.startswith("9 tokens of the prompt see each other")
    assert words in error


@pytest.mark.parametrize("groups", [(KVGroup(("a",)),), (KVGroup(("a",)), KVGroup(("b",), 9))])
def test_a_prefix_that_ends_within_a_range_goes_back_to_its_beginning(groups: tuple[KVGroup, ...]) -> None:
    core = CoreUnderTest(budget=64, groups=groups, block_size=4, num_blocks=96)
    add(core, 0, 23, [whole(6, 22)])
    core.run()
    grants = grants_of(core)
    add(core, 1, 21, [])  # other content: equal tokens are not found where an image began
    core.run()
    assert grants[0] == 17
    add(core, 2, 23, [whole(6, 22)])
    core.run()
    # 5 full blocks are known, of 4 tokens each; the last 4 of them hold tokens of the range
    assert grants[3] == 19
    add(core, 3, 40, [whole(6, 22)])
    core.run()
    assert grants[6] == 40 - 4, "the blocks behind the range are others"


def test_a_whole_range_is_found() -> None:
    core = CoreUnderTest(budget=32, block_size=4)
    add(core, 0, 30, [whole(6, 16)])
    core.run()
    grants = grants_of(core)
    add(core, 1, 30, [whole(6, 16)])
    core.run()
    assert grants[0] == 30 - 28
    add(core, 2, 30, [whole(6, 16, b"b")])
    core.run()
    assert grants[3] == 30 - 4


def test_busy_rows_do_not_keep_a_range_waiting_for_ever() -> None:
    """Short requests keep coming and would leave too little of each step."""
    core = CoreUnderTest(budget=8, policy="two_level", num_blocks=256, max_num_seqs=16)
    add(core, 0, 20, [whole(1, 9)], max_tokens=1)
    for number in range(1, 200):
        add(core, number, 3, [], max_tokens=1)
    for _ in range(30):
        core.step()
    assert core.tokens[0], "it has come to its first token"


def test_siblings_that_come_back_cut_nothing() -> None:
    """Preempted behind an image that ends the prompt: what they share ends before it, and estimates know."""
    core = CoreUnderTest(budget=16, block_size=4, num_blocks=20, max_num_seqs=4, preemption_mode="recompute")
    for number in range(3):
        add(core, number, 14, [whole(2, 14, bytes([number]))], n=2, max_tokens=20)
    core.run()
    assert core.core.scheduler.recovery.statistics()["recomputed_tokens_total"] > 0
    assert all(len(core.tokens[number << 10 | index]) == 20 for number in range(3) for index in range(2))


def test_siblings_that_come_back_leave_the_first_one_enough_for_a_range() -> None:
    """They want less than it does and go before it, so all that it gets for the range is what they hand on."""
    core = CoreUnderTest(budget=2, policy="srtf", prefix_caching=False, constraints=[LongPrefill(2)])
    add(core, 0, 4, [whole(1, 3)], n=2, max_tokens=8)
    while len(core.tokens[0]) < 2:
        core.step()
    core.core.scheduler.admission_control.preempt(core.core.scheduler.lifecycle.requests[0], "asked for")
    core.run()
    assert [len(core.tokens[index]) for index in range(2)] == [8, 8]


@pytest.mark.parametrize("seed", range(24))
def test_every_rule_holds_with_ranges(seed: int) -> None:
    """Rows may not stand within a range: the core's own check, after every step."""
    workload = Workload(
        seed, has_mishaps=True, has_late_rows=True, has_states=seed % 4 == 0, is_chunked=seed % 3 == 2, has_ranges=True
    )
    workload.run(120)
    workload.finish()


def test_a_pinned_prefix_is_not_found_where_an_image_stands_in_its_places() -> None:
    """Its last block is partly filled, so it is compared by tokens; and these may be equal."""
    core = CoreUnderTest(budget=32, block_size=4)
    core.add(0, list(range(6)), max_tokens=1, request={"keep": "p"})
    core.run()
    core.core.scheduler.pin("p", 6)
    add(core, 1, 12, [whole(5, 8)])
    add(core, 2, 12, [whole(6, 8)])
    core.run()
    assert (core.cached[1 << 10], core.cached[2 << 10]) == (4, 6)


@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "two_level"])
@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("is_known", [False, True])
def test_rows_that_run_leave_a_range_what_it_takes_in_the_end(policy: str, start: int, is_known: bool) -> None:
    """Two tokens of each step are left, which a text would get on by: after four steps they are eight."""
    core = CoreUnderTest(budget=8, policy=policy, num_blocks=512, block_size=4, max_num_seqs=8, max_model_len=256)
    if is_known:
        add(core, 9, 9, [], max_tokens=1)
        core.run()
    for number in range(6):
        add(core, number, 3, [], max_tokens=100, ignore_eos=True)
    for _ in range(6):
        core.step()
    add(core, 6, 14, [whole(start, start + 8)], max_tokens=1)
    for _ in range(12):
        core.step()
    assert core.tokens[6 << 10], "it has come to its first token"
    assert all(len(core.tokens[number << 10]) > 12 for number in range(6)), "and nobody else stood still for long"

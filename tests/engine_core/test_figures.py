"""The walk-throughs of chapter 3 as golden tests: figures 3.6, 3.7 and 3.8, with the physical blocks of the text."""

from __future__ import annotations

from quire.testing.core import CoreUnderTest


def tables(core: CoreUnderTest) -> list[list[int]]:
    return [sequence.block_tables[0] for sequence in core.scheduler.running.living_sequences()]


def test_figure_3_6_blocks_on_demand() -> None:
    core = CoreUnderTest(num_blocks=9, block_size=4, free_order=[7, 1, 3, 0, 2, 4, 5, 6, 8], prefix_caching=False)
    core.add(1, list(range(7)), max_tokens=8)
    core.step()
    assert tables(core) == [[7, 1]]  # two logical blocks for seven tokens
    core.step()
    assert tables(core) == [[7, 1]]  # the first generated token fills the last slot
    core.step()
    assert tables(core) == [[7, 1, 3]]  # the second one needs a new block


def test_figure_3_7_two_requests_share_one_pool() -> None:
    core = CoreUnderTest(num_blocks=9, block_size=4, free_order=[7, 1, 5, 2, 3, 8, 0, 4, 6], prefix_caching=False)
    core.add(1, list(range(7)), max_tokens=8)
    core.add(2, list(range(20, 27)), max_tokens=8)
    for _ in range(3):
        core.step()
    assert tables(core) == [[7, 1, 3], [5, 2, 8]]  # neighbours in the table need not be neighbours in memory


def test_figure_3_8_parallel_sampling_shares_the_prompt() -> None:
    core = CoreUnderTest(num_blocks=9, block_size=4, free_order=[7, 1, 3, 0, 2, 4, 5, 6, 8], prefix_caching=False)
    core.add(1, list(range(7)), max_tokens=8, n=2, temperature=1.0)
    core.step()
    assert tables(core) == [[7, 1], [7, 1]]
    assert [core.pool.count(block) for block in (7, 1)] == [2, 2]
    core.step()
    # A1 writes first and copies block 1 to block 3; then A2 holds block 1 alone and writes in place
    assert sorted(tables(core)) == [[7, 1], [7, 3]]
    assert [core.pool.count(block) for block in (7, 1, 3)] == [2, 1, 1]
    assert core.manager.num_copied_blocks == 1
    core.run()
    assert core.pool.num_held == 0


def test_waste_is_less_than_a_block_a_sequence() -> None:
    core = CoreUnderTest(num_blocks=64, block_size=16, prefix_caching=False)
    for request in range(4):
        core.add(request, list(range(5 + 9 * request)), max_tokens=20)
    while core.core.has_work:
        core.step()
        for sequence in core.scheduler.running.living_sequences():
            slots = 16 * len(sequence.block_tables[0])
            assert 0 <= slots - sequence.num_computed_tokens < 16

"""The prefix cache is asked for each request that waits in each step, and looks each one up once."""

from __future__ import annotations

import pytest

from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.testing.core import CoreUnderTest

BLOCK = 4
NUM_REQUESTS = 12


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what was found, one for each look-up."""
    lengths: list[int] = []
    look_up = BlockPool.length_of_chain

    def counted(*args: object) -> int:
        lengths.append(look_up(*args))  # type: ignore[arg-type]
        return lengths[-1]

    monkeypatch.setattr(BlockPool, "length_of_chain", counted)
    return lengths


def prompt_of(number: int, length: int = 5 * BLOCK) -> list[int]:
    return [number] * length


def test_each_of_those_that_wait_is_looked_up_once(looked_up: list[int]) -> None:
    core = CoreUnderTest(policy="two_level", max_num_seqs=4, budget=4 * BLOCK, num_blocks=512)
    for number in range(NUM_REQUESTS):
        core.add(number, prompt_of(number), max_tokens=3)
    core.run()
    assert looked_up == [0] * NUM_REQUESTS


def test_a_hit_grows_with_what_others_have_computed(looked_up: list[int]) -> None:
    core = CoreUnderTest(policy="two_level", max_num_seqs=1, budget=2 * BLOCK, num_blocks=512)
    for number in range(2):
        core.add(number, prompt_of(7), max_tokens=1)
    core.run()
    assert core.manager.num_hit_tokens == 4 * BLOCK
    # the second one anew whenever the first had computed a block that it lacks
    assert looked_up[0] == 0
    assert looked_up[1:] == sorted(set(looked_up[1:]))


def test_a_name_that_was_lost_makes_it_shorter() -> None:
    core = CoreUnderTest(policy="two_level", max_num_seqs=2, num_blocks=64)
    core.add(0, prompt_of(7), max_tokens=1)
    core.run()
    core.add(1, prompt_of(7), max_tokens=1)
    (sequence,) = core.scheduler.lifecycle.requests[1].sequences.values()
    assert core.manager.get_computed_blocks(sequence).num_tokens == 4 * BLOCK
    core.manager.reset_prefix_cache()
    assert core.manager.get_computed_blocks(sequence).num_tokens == 0

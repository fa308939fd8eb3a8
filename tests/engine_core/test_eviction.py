"""Whose cached block goes first: the least recently used one, or that of a tenant that has more than its share."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.capacity import CachePlan
from quire.engine_core.kv_cache_manager.eviction import ByShares, LeastRecentlyUsed, eviction_order
from quire.engine_core.launch import make_scheduler
from quire.messages import Tenancy, int_array
from quire.testing.core import FULL, CoreUnderTest
from quire.testing.fake_llm import fake_config
from quire.testing.simulator.engine_settings import PLAIN_ENGINE, EngineSettings, random_engine
from quire.testing.simulator.workload import Workload

A, B, C = (Tenancy(name=name, cache_scope=f"secret of {name}") for name in "abc")


def pool_of(num_blocks: int, share: float | None) -> BlockPool:
    return BlockPool(num_blocks, order=eviction_order(num_blocks, share))


def cached(pool: BlockPool, owners: str) -> list[int]:
    """A cached block for each letter, the first one least recently used."""
    blocks = pool.allocate(len(owners))
    for block, owner in zip(blocks, owners, strict=True):
        pool.register(block, (0, b"%d" % block), owner)
    pool.release(int_array(blocks))
    return blocks


@pytest.mark.parametrize(
    ("owners", "share", "gone"),
    [
        # nobody is over: the least recently used
        ("abab", 0.5, [0, 1, 2, 3]),
        ("bbaa", 0.5, [0, 1, 2, 3]),
        ("bbaa", 1.0, [0, 1, 2, 3]),
        ("bbaa", None, [0, 1, 2, 3]),
        # one of a comes, and then both have two
        ("baaa", 0.5, [1, 0, 2, 3]),
        ("abbb", 0.25, [1, 2, 0, 3]),
        # two are over: first who has most
        ("bbcaaac", 2 / 7, [3, 0, 1, 2, 4, 5, 6]),
        # 0: always of who has most; of equals who was over first
        ("baacc", 0.0, [1, 3, 0, 2, 4]),
    ],
)
def test_who_has_more_than_the_share_gives_first(owners: str, share: float | None, gone: list[int]) -> None:
    pool = pool_of(len(owners), share)
    blocks = cached(pool, owners)
    found = [pool.allocate(1)[0] for _ in owners]
    assert [blocks.index(block) for block in found] == gone
    pool.check_invariants(pool.counts)


def test_blocks_that_are_held_count_too() -> None:
    """Else who fills the memory with what runs would push out what little another has cached."""
    pool = pool_of(8, 0.5)
    b1, b2 = cached(pool, "bb")
    held = pool.allocate(5)
    for block in held:
        pool.register(block, (0, b"held %d" % block), "a")
    (own,) = cached(pool, "a")
    assert pool.allocate(1) == [own]
    # nothing of a is cached any more: who has nothing to give does not give
    assert pool.allocate(1) == [b1]
    assert pool.find((0, b"%d" % b2)) == b2
    pool.check_invariants(pool.counts)


def test_what_is_revived_or_renamed_stays_its_owners() -> None:
    pool = pool_of(4, 0.25)
    b, a1, a2, a3 = cached(pool, "baaa")
    pool.hold(int_array([a1]))
    pool.release(int_array([a1]))
    assert pool.allocate(1) == [a2]
    pool.check_invariants(pool.counts)
    # a2 was given up, and is anonymous until somebody names it
    pool.register(a2, (0, b"new"), "b")
    pool.release(int_array([a2]))
    assert [pool.allocate(1)[0] for _ in range(4)] == [a3, b, a1, a2]
    pool.forget_all()
    pool.check_invariants(pool.counts)
    assert isinstance(pool._cached, ByShares)
    assert not pool._cached._counts


@pytest.mark.parametrize(("share", "order"), [(None, LeastRecentlyUsed), (0.5, ByShares)])
def test_the_option_reaches_the_pool(share: float | None, order: type) -> None:
    config = replace(fake_config(), tenant_cache_share=share)
    plan = CachePlan([FULL], 8, 64, "", 0)
    assert type(make_scheduler(config, plan).manager.pool._cached) is order


# ---------------------------------------------------------------------------------------------- SEC-28


def hit_rate_of_b(share: float | None, *, flood: int, num_running: int = 4) -> float:
    """B asks again and again with one of eight beginnings, each five blocks long; A asks `flood` times as often, and
    never the same twice. What part of B's tokens is found."""
    core = CoreUnderTest(
        num_blocks=128, block_size=4, budget=128, max_num_seqs=num_running, policy="two_level", tenant_cache_share=share
    )
    pick = random.Random(28)
    beginnings = [[1 + number, *(pick.randrange(50) for _ in range(19))] for number in range(8)]
    num_tokens = num_found = 0
    for number in range(60):
        for attack in range(flood):
            prompt = [pick.randrange(50) for _ in range(40)]
            core.add(10_000 + number * flood + attack, prompt, max_tokens=1, request={"tenant": A})
        prompt = [*pick.choice(beginnings), pick.randrange(50)]
        core.add(number, prompt, max_tokens=1, request={"tenant": B})
        core.run()
        num_tokens += len(prompt)
        num_found += core.cached[number << 10]
    core.assert_empty()
    return num_found / num_tokens


def test_a_flood_of_one_tenant_leaves_another_at_least_half_of_its_hits() -> None:
    """SEC-28."""
    alone = hit_rate_of_b(None, flood=0)
    assert alone > 0.8
    # this is what it is for
    assert hit_rate_of_b(None, flood=12) < 0.25 * alone
    for share in (0.0, 0.5):
        assert hit_rate_of_b(share, flood=0) == alone, "who is alone has all of it"
        assert hit_rate_of_b(share, flood=12) >= 0.5 * alone


# ---------------------------------------------------------------------------------------------- nothing else changes


def log_of(seed: int, engine: EngineSettings) -> list[list[int]]:
    workload = Workload(seed, engine=engine)
    log = [workload.step() for _ in range(120)]
    workload.finish()
    return log


@pytest.mark.parametrize("seed", range(4))
def test_with_room_for_all_every_decision_is_the_same(seed: int) -> None:
    """Of a policy that does not ask whose a request is."""
    for drawn in (PLAIN_ENGINE, random_engine(seed)):
        settings = replace(drawn, policy="fifo", policy_options={}, tenant_cache_share=None)
        assert log_of(seed, settings) == log_of(seed, replace(settings, tenant_cache_share=1.0))

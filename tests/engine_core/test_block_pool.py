"""The pool as a state machine: whatever is done, blocks are free, cached or held, and counts equal holders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.eviction import eviction_order
from quire.messages import int_array


class PoolMachine(RuleBasedStateMachine):
    """`held` is the model: a list of holders, each a block; `offered` are those of them that would give it up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[int] = []
        self.offered: list[int] = []
        self.next_name = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not set(blocks) & set(self.held), "a held block was handed out"
            self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.hold(int_array([block]))
        self.held.append(block)

    @precondition(lambda self: self.firm())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.firm()))
        self.held.remove(block)
        self.pool.release(int_array([block]))

    def firm(self) -> list[int]:
        """Held by somebody who does not offer it."""
        return [block for block in sorted(set(self.held)) if self.held.count(block) > self.offered.count(block)]

    @precondition(lambda self: self.firm())
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.firm()))
        self.offered.append(block)
        self.pool.offer(int_array([block]))

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.offered))
        self.offered.remove(block)
        self.pool.withdraw(int_array([block]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), same=st.booleans(), owner=st.sampled_from("abc"))
    def register(self, data: st.DataObject, same: bool, owner: str) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.next_name += not same
        self.pool.register(block, (0, str(self.next_name).encode()), owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        if self.pool.key_of(block) is None:
            self.pool.claim(block, (0, str(self.next_name).encode()))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget_one(self, data: st.DataObject) -> None:
        self.pool.forget(data.draw(st.sampled_from(self.held)))

    @rule(numbers=st.sets(st.integers(0, 12)))
    def hide(self, numbers: set[int]) -> None:
        num_cached = self.pool.num_cached
        names = [str(number).encode() for number in sorted(numbers)]
        self.pool.hide(names)
        assert [self.pool.find((0, name)) for name in names] == [None] * len(names)
        assert self.pool.num_cached == num_cached

    @rule(number=st.integers(0, 12))
    def revive(self, number: int) -> None:
        block = self.pool.find((0, str(number).encode()))
        if block is not None:
            self.pool.hold(int_array([block]))
            self.held.append(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        assert self.pool.num_cached == 0

    @invariant()
    def partition(self) -> None:
        num_blocks = self.pool.num_blocks
        held, offered = (np.bincount(int_array(some), minlength=num_blocks) for some in (self.held, self.offered))
        self.pool.check_invariants(held, offered)
        within_reach = self.pool.within_reach(np.arange(num_blocks)).tolist()
        assert within_reach == sorted(set(range(num_blocks)) - set(self.firm()))
        assert self.pool.num_within_reach == len(within_reach)
        assert self.pool.num_held == len(set(self.held))


class SharedPoolMachine(PoolMachine):
    """The same where tenants have shares."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, order=eviction_order(6, 0.4))


for machine in (PoolMachine, SharedPoolMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestSharedPool = SharedPoolMachine.TestCase


def test_the_deepest_block_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.register(block, (0, bytes([index])))
    pool.release(int_array(blocks[::-1]))
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find((0, bytes([0]))) == blocks[0]


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.register(block, (0, bytes([block])))
    pool.release(int_array([first]))
    pool.release(int_array([second]))
    pool.hold(int_array([first]))
    pool.release(int_array([first]))
    assert pool.allocate(1) == [second]


def test_a_twin_that_nobody_holds_makes_way() -> None:
    pool, key = BlockPool(3), (0, b"content")
    first, second, third = pool.allocate(3)
    assert pool.register(first, key)
    assert not pool.register(second, key)
    pool.release(int_array([first]))
    assert pool.register(second, key)
    assert pool.find(key) == second
    assert pool.free_blocks == [first]
    pool.release(int_array([second]))
    pool.hold(int_array([second]))
    assert not pool.register(third, key)
    pool.check_invariants(int_array([0, 1, 1]))


def test_what_is_hidden_is_not_found_and_gives_way_in_its_turn() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, (0, bytes([block])))
    for block in blocks:
        pool.release(int_array([block]))
    pool.hide([bytes([blocks[0]]), bytes([blocks[1]])])
    assert [pool.find((0, bytes([block]))) for block in blocks] == [None, None, blocks[2]]
    assert pool.num_cached == 3
    assert pool.allocate(2) == blocks[:2]
    assert pool.num_evictions == 2
    # whoever has the name next is found
    assert pool.register(blocks[1], (0, bytes([blocks[1]])))
    assert pool.find((0, bytes([blocks[1]]))) == blocks[1]


def test_a_name_that_leads_nowhere_is_a_mistake_of_ours() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, (0, b"content"))
    pool._blocks[0].clear()
    with pytest.raises(KeyError):
        pool.discard(block)

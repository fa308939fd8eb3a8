"""The router on numbers: prompts are names of blocks, replicas are numbers."""

import itertools
import random

import pytest

from quire.routing import POLICIES, HeldPrefixes, Router


def router_of(size, policy="least_time"):
    router = Router(policy, block_size=16)
    for number in range(size):
        router.add(number, seconds_per_token=1e-3, seconds_per_step=0.01)
    return router


class Traffic:
    """Requests with names of their own."""

    def __init__(self, router):
        self.router = router
        self._names = itertools.count()

    def send(self, blocks, num_tokens=None):
        """The request, and the replica that it went to."""
        num_tokens = num_tokens or len(blocks) * 16 + 1
        choice = self.router.choose(blocks, num_tokens)
        name = next(self._names)
        self.router.begin(name, choice, blocks, num_tokens)
        return name, choice

    def run(self, blocks):
        """To its end; its blocks stay in the cache."""
        name, choice = self.send(blocks)
        self.router.first_token(name)
        self.router.stored(choice.replica, blocks)
        self.router.end(name)
        return choice


def test_the_first_requests_are_spread():
    traffic = Traffic(router_of(4))
    assert sorted(traffic.send([10 * n])[1].replica for n in range(4)) == [0, 1, 2, 3]


def test_a_prompt_goes_where_most_of_it_is():
    traffic = Traffic(router_of(3))
    holder = traffic.run([1, 2, 3]).replica
    other = traffic.run([7, 8]).replica
    assert other != holder
    choice = traffic.run([1, 2, 3, 4])
    assert (choice.replica, choice.num_cached_tokens) == (holder, 48)
    assert traffic.run([7, 8, 9]).replica == other


def test_the_last_token_is_always_computed():
    traffic = Traffic(router_of(1))
    traffic.run([1, 2])
    assert traffic.router.choose([1, 2], 32).num_cached_tokens == 31


def test_what_is_on_its_way_counts_until_it_is_over():
    traffic = Traffic(router_of(2))
    name, first = traffic.send([1, 2, 3])
    traffic.router.first_token(name)
    assert traffic.send([1, 2, 3, 4])[1].replica == first.replica
    traffic.router.end(name)
    traffic.router.end(name)
    assert traffic.router.choose([1, 2, 3], 49).num_cached_tokens == 48
    traffic.router.end(1)
    assert traffic.router.choose([1, 2, 3], 49).num_cached_tokens == 0


def test_tokens_that_wait_count_as_time():
    router = router_of(2)
    traffic = Traffic(router)
    router.stored(0, [1, 2])
    traffic.send([50], num_tokens=2000)
    traffic.send([60], num_tokens=10)
    # replica 0 holds 32 tokens of it, but 2,000 wait there
    assert traffic.send([1, 2, 3])[1].replica == 1


def test_what_was_removed_is_not_expected():
    router = router_of(2)
    router.stored(0, [1, 2, 3])
    router.removed(0, [3])
    assert router.choose([1, 2, 3], 60).num_cached_tokens == 32
    router.cleared(0)
    assert router.choose([1, 2, 3], 60).num_cached_tokens == 0


def test_a_replica_that_is_gone_is_not_chosen_and_comes_back_empty():
    router = router_of(2)
    traffic = Traffic(router)
    name, first = traffic.send([1, 2])
    router.stored(first.replica, [1, 2])
    router.remove(first.replica)
    router.end(name)
    assert {traffic.send([1, 2])[1].replica for _ in range(3)} == {1 - first.replica}
    router.add(first.replica)
    assert [one.num_sequences for one in router.replicas()] == [3, 0]
    assert router.choose([3, 4], 33).replica == first.replica
    assert router.choose([1, 2], 33).replica == 1 - first.replica
    router.stored(7, [1])
    assert 7 not in {one.number for one in router.replicas()}


def test_nobody_has_much_more_than_the_mean_and_a_hot_prefix_is_replicated():
    router = router_of(4)
    traffic = Traffic(router)
    rng = random.Random(1)
    open_names = []
    hot = [1, 2, 3, 4]
    for number in range(2000):
        blocks = [*hot, 1000 + number] if rng.random() < 10 / 11 else [5000 + number]
        name, choice = traffic.send(blocks)
        router.first_token(name)
        router.stored(choice.replica, blocks)
        open_names.append(name)
        if len(open_names) > 64:
            router.end(open_names.pop(rng.randrange(len(open_names))))
        loads = [one.num_sequences for one in router.replicas()]
        if sum(loads) >= 40:
            # one comes at a time, and is rounded up
            assert max(loads) <= 1.25 * sum(loads) / 4 + 1
    assert all(router._prefixes._told[hot[0]] >> number & 1 for number in range(4))


def test_round_robin_and_least_loaded():
    traffic = Traffic(router_of(3, "round_robin"))
    assert [traffic.run([1, 2]).replica for _ in range(5)] == [0, 1, 2, 0, 1]
    traffic.router.remove(2)
    assert [traffic.run([1, 2]).replica for _ in range(3)] == [0, 1, 0]
    traffic = Traffic(router_of(2, "least_loaded"))
    assert [traffic.send([1, 2])[1].replica for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_return_to_nothing(policy):
    router = router_of(3, policy)
    traffic = Traffic(router)
    rng = random.Random(2)
    names = [traffic.send([rng.randrange(5), rng.randrange(5)])[0] for _ in range(100)]
    rng.shuffle(names)
    for name in names:
        if rng.random() < 0.5:
            router.first_token(name)
        router.end(name)
    assert {(one.num_sequences, one.num_waiting_tokens) for one in router.replicas()} == {(0, 0)}
    assert router.statistics() == {"routed_blocks": 0, "routed_requests_open": 0}
    assert not router._prefixes._num_coming


def test_halving_finds_what_walking_finds():
    rng = random.Random(3)
    for _ in range(200):
        held = HeldPrefixes()
        blocks = [rng.getrandbits(64) for _ in range(rng.randrange(1, 40))]
        lengths = {replica: rng.randrange(len(blocks) + 1) for replica in range(8)}
        for replica, length in lengths.items():
            (held.stored if rng.random() < 0.5 else held.comes)(replica, blocks[:length])
        found = {
            replica: length
            for length, members in held.lengths(blocks, 0xFF)
            for replica in range(8)
            if members >> replica & 1
        }
        assert found == {replica: length for replica, length in lengths.items() if length}


def test_what_a_request_costs_does_not_grow_with_its_prompt():
    held = HeldPrefixes()
    blocks = list(range(1 << 16))
    held.comes(0, blocks)
    assert len(held._coming) < 1000
    held.came(0, blocks)
    assert not held._coming
    # what is held is found to a 64th
    for length in (128, 129, 1000, 40_000):
        held.stored(1, blocks[:length])
        [(found, members)] = held.lengths(blocks, 0b11)
        assert members == 0b10
        assert length * 63 / 64 <= found <= length
        held.cleared(1)

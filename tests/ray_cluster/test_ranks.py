"""Ranks that Ray places: the tokens of one rank, with a stage or a half of each layer on another machine."""

import pytest

from quire.testing.greedy import generate_greedy, real_core

PROMPTS = [[5, 6, 7, 8, 9], [3] * 20, [4, 2], [7] * 9]
RAY = {"distributed_executor_backend": "ray", "host_ip": "127.0.0.1"}


def generated(checkpoint, **options):
    """Tokens, and the ranks of each machine."""
    core = real_core(checkpoint, kv_cache_memory_bytes=16 << 20, **options)
    try:
        hosts = core.executor._placement.hosts() if "host_ip" in options else {}
        return generate_greedy(core, PROMPTS, 12), hosts
    finally:
        core.shutdown()


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"])
def test_the_tokens_are_those_of_one_rank(cluster, checkpoint, size):
    expected, _ = generated(checkpoint)
    assert generated(checkpoint, **RAY, **{size: 2}, num_threads=2) == (expected, {0: [0], 1: [1]})


def test_ranks_that_share_layers_stand_on_one_machine(cluster, checkpoint):
    expected, _ = generated(checkpoint)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert generated(checkpoint, **RAY, **sizes) == (expected, {0: [0, 1], 1: [2, 3]})


def test_bits_are_those_of_two_ranks_on_one_machine(cluster, checkpoint):
    """The sums are formed in the same order: what differs in one bit would sooner or later be another token."""
    options = {"tensor_parallel_size": 2, "rank_invariant": True, "num_threads": 2}
    (tokens, hosts), (expected, _) = generated(checkpoint, **RAY, **options), generated(checkpoint, **options)
    assert tokens == expected
    assert len(hosts) == 2

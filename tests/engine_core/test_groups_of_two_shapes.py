"""Layers that keep different numbers of bytes: what the groups of such a model are, and that a core serves them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.messages import LayerSpec
from quire.testing.core import CoreUnderTest
from quire.worker.attention import Attention
from quire.worker.kv_cache import KVCache

WINDOWS = (0, 8, 24)
# window, heads of keys, size of a head
layer_shapes = st.lists(
    st.tuples(st.sampled_from(WINDOWS), st.integers(1, 4), st.sampled_from([4, 8, 12])), min_size=1, max_size=12
)


def spec(name: str, window: int, num_kv_heads: int, dim: int) -> LayerSpec:
    return LayerSpec(
        name=name, num_kv_heads=num_kv_heads, key_dim=dim, value_dim=dim, bytes_per_element=4, sliding_window=window
    )


@given(layer_shapes)
def test_every_layer_has_a_place_in_a_block_that_is_as_small_as_it_can_be(shapes: list[tuple[int, int, int]]) -> None:
    specs = {str(number): spec(str(number), *shape) for number, shape in enumerate(shapes)}
    groups, width = make_groups(list(specs.values()))
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    sizes = []
    for group in groups:
        members = [specs[name] for name in group.layer_names]
        assert {layer.sliding_window for layer in members} == {group.sliding_window}
        sizes.append(sum(layer.bytes_per_token for layer in members))
    assert max(sizes) == width
    # two neighbours of one window fill more than a block, or they would be one group
    for (one, size), (other, next_size) in pairwise(zip(groups, sizes, strict=True)):
        first = specs[other.layer_names[0]].bytes_per_token
        assert one.sliding_window != other.sliding_window or size + first > width >= next_size


@settings(max_examples=30)
@given(layer_shapes)
def test_what_one_layer_writes_no_other_of_its_group_reads(shapes: list[tuple[int, int, int]]) -> None:
    model = {
        str(number): Attention(heads, heads, dim, 1.0, name=str(number), sliding_window=window)
        for number, (window, heads, dim) in enumerate(shapes)
    }
    groups, width = make_groups([layer.spec for layer in model.values()], 2)
    cache = KVCache()
    cache.allocate(model, [group.layer_names for group in groups], 3, 2, torch.device("cpu"))
    assert cache.num_bytes == 3 * width
    for group in groups:
        members = [model[name] for name in group.layer_names]
        caches = [cache for layer in members for cache in (layer.k_cache, layer.v_cache) if cache is not None]
        for number, own in enumerate(caches):
            own[1] = number
        for number, own in enumerate(caches):
            assert (own[1] == number).all()
    # nothing reached into the neighbours of block 1
    assert all(not tensor[[0, 2]].any() for tensor in cache.tensors)


def core(num_blocks: int, **options: object) -> CoreUnderTest:
    """As many layers as Gemma 4 E4B has, a window of 10: seven groups, two of which keep every token."""
    large = [spec(f"full{number}", 0, 2, 16) for number in range(4)]
    small = [spec(f"window{number}", 10, 2, 8) for number in range(20)]
    groups, width = make_groups([*large, *small], 4)
    assert [len(group.layer_names) for group in groups] == [2, 2, 4, 4, 4, 4, 4]
    assert len(groups) * width == 4 * sum(layer.bytes_per_token for layer in (*large, *small))
    return CoreUnderTest(num_blocks=num_blocks, block_size=4, groups=groups, max_model_len=64, **options)  # type: ignore[arg-type]


def test_windows_go_on_giving_blocks_back() -> None:
    under_test = core(400)
    under_test.add(1, list(range(20)), max_tokens=40)
    most = 0
    while under_test.core.has_work:
        under_test.step()
        under_test.poison_free_blocks()
        most = max(most, under_test.pool.num_held)
    # 15 blocks in each of two groups that keep all; a window of 10 lies in four, and the prompt was written in one step
    assert 2 * 15 + 5 * 3 <= most <= 2 * 15 + 5 * 5
    under_test.assert_empty()


def test_a_prefix_is_found_in_all_groups_and_scarce_memory_changes_no_token() -> None:
    prompts = {number: [*range(20), *range(number, number + 7)] for number in range(1, 6)}
    ample = core(900)
    for number, prompt in prompts.items():
        ample.add(number, prompt, max_tokens=25)
    ample.run()
    assert sum(ample.cached.values()) == 4 * 20
    for mode in ("swap", "recompute"):
        scarce = core(120, num_host_blocks=120, preemption_mode=mode, budget=16)
        for number, prompt in prompts.items():
            scarce.add(number, prompt, max_tokens=25)
        scarce.run()
        assert scarce.core.statistics()["num_preemptions_total"] > 0
        assert scarce.tokens == ample.tokens
        scarce.assert_empty()

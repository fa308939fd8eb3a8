"""How many blocks there are, and why: a table of situations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine_core.kv_cache_manager.capacity import GIB, CacheOptions, plan_cache
from quire.engine_core.kv_cache_manager.groups import KVGroup, make_groups, most_blocks_of
from quire.errors import CapacityError
from quire.messages import SOURCE, TEXT, LayerSpec, WorkerCapacity


def layers(count: int, *, window: int = 0, **changes: Any) -> list[LayerSpec]:
    spec = LayerSpec(name="", num_kv_heads=8, key_dim=128, value_dim=128, bytes_per_element=2, sliding_window=window)
    return [
        msgspec.structs.replace(spec, name=f"{window}.{i}{changes.get('part', '')}", **changes) for i in range(count)
    ]


def asked(**changes: object) -> CacheOptions:
    defaults = {
        "block_size": 16,
        "max_model_len": 2048,
        "may_lower_max_model_len": True,
        "max_num_seqs": 4,
        "step_tokens": 512,
        "num_blocks": None,
        "memory_bytes": None,
        "is_cpu": True,
    }
    return CacheOptions(**{**defaults, **changes})  # type: ignore[arg-type]


def measured(gib: float, specs: list[LayerSpec]) -> WorkerCapacity:
    return WorkerCapacity(layers=specs, available_bytes=int(gib * GIB), explanation="what is free")


def test_bytes_per_token_follow_the_formula() -> None:
    # 3.3: OPT-13B keeps 2 x 5120 x 40 x 2 bytes = 800 KB a token; 2.1.2: 100 layers of 8 heads of 128 about 400 KB
    opt = LayerSpec(name="", num_kv_heads=40, key_dim=128, value_dim=128, bytes_per_element=2)
    assert 40 * opt.bytes_per_token == 819_200
    assert 100 * layers(1)[0].bytes_per_token == 409_600


def state(name: str, num_bytes: int) -> LayerSpec:
    return LayerSpec(name=name, num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0, state_bytes=num_bytes)


def test_a_state_costs_blocks_beside_those_of_the_tokens() -> None:
    """Two attention layers: a block has two chunks of 64 KiB. Three states of 100 KB take two chunks each."""
    specs = [*layers(2), *(state(f"s{i}", 100_000) for i in range(3))]
    groups, block_bytes = make_groups(specs, 16)
    assert [group.num_state_blocks for group in groups] == [0, 3]
    assert block_bytes == 2 * 4096 * 16
    plan = plan_cache(measured(64, specs), asked())
    assert plan.num_blocks == 4 * (2048 // 16 + 3)
    assert "(the state of a sequence takes 3 of them)" in plan.explanation
    assert f"{(plan.num_blocks - 3) * 16:,} tokens" in plan.explanation
    # one request: what is not its state's holds its tokens
    short = plan_cache(measured(64, specs), asked(num_blocks=19))
    assert short.max_model_len == 16 * 16


def test_without_attention_a_sequence_costs_one_block_whatever_its_length() -> None:
    specs = [state(f"s{i}", 100_000) for i in range(3)]
    groups, block_bytes = make_groups(specs, 16)
    assert [group.num_state_blocks for group in groups] == [1]
    assert block_bytes == 3 * 100_032
    plan = plan_cache(measured(64, specs), asked())
    assert plan.num_blocks == 4
    assert plan.max_model_len == 2048


def test_a_small_model_takes_what_its_requests_can_use() -> None:
    plan = plan_cache(measured(64, layers(2)), asked())
    assert plan.num_blocks == 4 * 2048 // 16
    assert "all that max_num_seqs requests can use" in plan.explanation
    assert "4.0 requests of 2,048 tokens at once" in plan.explanation


def test_a_cpu_gives_half_of_what_is_free_and_no_more_than_the_cap() -> None:
    tokens = {gib: plan_cache(measured(gib, layers(28)), asked(max_num_seqs=256)).num_blocks * 16 for gib in (4, 64)}
    per_token = 28 * 4096
    assert tokens[4] == 2 * GIB // per_token // 16 * 16
    assert tokens[64] == 4 * GIB // per_token // 16 * 16


def test_a_gpu_takes_all_that_is_left() -> None:
    plan = plan_cache(measured(64, layers(28)), asked(max_num_seqs=4096, is_cpu=False))
    assert plan.num_blocks == 64 * GIB // (28 * 4096 * 16)


@pytest.mark.parametrize(("changes", "blocks"), [({"num_blocks": 77}, 77), ({"memory_bytes": 2**27}, 1024)])
def test_absolute_sizes_are_obeyed(changes: dict[str, int], blocks: int) -> None:
    plan = plan_cache(measured(64, layers(2)), asked(**changes))
    assert plan.num_blocks == blocks


def test_an_explicit_size_wins_over_shares_and_steps() -> None:
    room = WorkerCapacity(layers=layers(2), available_bytes=GIB, free_bytes=4 * GIB, explanation="what is free")
    assert plan_cache(room, asked(memory_bytes=3 * GIB, num_blocks=7)).num_blocks == 7, "blocks are the last word"
    plan = plan_cache(room, asked(memory_bytes=3 * GIB))
    assert plan.num_blocks == 3 * GIB // (2 * 4096 * 16)
    assert "2.0 GiB more than gpu_memory_utilization and the largest step would leave" in plan.explanation
    assert plan_cache(room, asked(num_blocks=20_000)).num_blocks == 20_000
    with pytest.raises(CapacityError, match=f"5.0 GiB, 4.0 GiB is available.*lower kv_cache_memory_bytes to {4 * GIB}"):
        plan_cache(room, asked(memory_bytes=5 * GIB))


def test_a_length_that_was_asked_for_may_take_all_that_is_free() -> None:
    """A request of 2,048 tokens needs 224 MiB; half of 300 MiB would be refused."""
    room = measured(300 / 1024, layers(28))
    assert plan_cache(room, asked(may_lower_max_model_len=False)).num_blocks == 128
    assert plan_cache(room, asked()).max_model_len < 2048


def test_a_length_that_was_ours_is_lowered_to_what_fits() -> None:
    plan = plan_cache(measured(64, layers(2)), asked(num_blocks=10))
    assert plan.max_model_len == 160
    assert "max_model_len lowered from 2048 to 160" in plan.explanation


def test_a_length_that_was_asked_for_is_an_error_with_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"max_model_len=2048: needs 16.0 MiB .*128 blocks.*Lower max_model_len to 160"
    ):
        plan_cache(measured(64, layers(2)), asked(num_blocks=10, may_lower_max_model_len=False))


def test_windows_form_groups_of_equal_size_and_need_fewer_blocks() -> None:
    plan = plan_cache(measured(64, [*layers(2), *layers(6, window=128)]), asked(step_tokens=64))
    assert [(len(group.layer_names), group.sliding_window) for group in plan.groups] == [
        (2, 0),
        (2, 128),
        (2, 128),
        (2, 128),
    ]
    # 128 blocks for all tokens, and 8 for a window, 4 for a step, 1 for the boundaries, three times
    assert plan.num_blocks == 4 * (128 + 3 * 13)


def test_chunks_form_groups_of_their_own() -> None:
    chunked = [
        msgspec.structs.replace(layer, name=f"chunk.{layer.name}", is_chunked=True) for layer in layers(2, window=128)
    ]
    groups, bytes_per_token = make_groups([*layers(2), *layers(2, window=128), *chunked, *draft(1, window=128)])
    assert [(group.sliding_window, group.is_chunked, len(group.layer_names)) for group in groups] == [
        (0, False, 2),
        (128, False, 3),
        (128, True, 2),
    ]
    assert bytes_per_token == 3 * 4096


@pytest.mark.parametrize(("num_computed", "first"), [(0, 0), (1, 0), (12, 0), (13, 3), (24, 3), (25, 6), (30, 6)])
def test_a_chunk_is_kept_until_its_last_token_is_surely_computed(num_computed: int, first: int) -> None:
    assert KVGroup(("a",), 12, is_chunked=True).first_needed_block(num_computed, 4) == first


# heads of keys and their size, of layers with a window and of those without; how many there are of each
GEMMA_4 = {
    "E2B": ((1, 256, 12), (1, 512, 3), [3, 6, 6]),
    "E4B": ((2, 256, 20), (2, 512, 4), [2, 2, 4, 4, 4, 4, 4]),
    "31B": ((16, 256, 50), (4, 512, 10), [10, *[5] * 10]),
    # layers with a window in halves: 5 layers without one are as much as 5 halves
    "26B": ((4, 256, 50), (2, 512, 5), [5] * 11),
}


def of_two_shapes(small: tuple[int, int, int], large: tuple[int, int, int]) -> list[LayerSpec]:
    (few, width, count), (others, other_width, other_count) = small, large
    return [
        *layers(other_count, num_kv_heads=others, key_dim=other_width, value_dim=other_width),
        *layers(count, window=1024, num_kv_heads=few, key_dim=width, value_dim=width),
    ]


@pytest.mark.parametrize("name", GEMMA_4)
def test_published_layers_of_two_shapes_fill_blocks_without_a_gap(name: str) -> None:
    small, large, sizes = GEMMA_4[name]
    specs = of_two_shapes(small, large)
    groups, block_bytes = make_groups(specs, 16)
    assert [len(group.layer_names) for group in groups] == sizes
    assert len(groups) * block_bytes == 16 * sum(layer.bytes_per_token for layer in specs)


def test_what_cannot_be_filled_stays_empty() -> None:
    """7 layers with a window, and 2 without that keep half as much again: the last group has one layer of three."""
    specs = of_two_shapes((2, 128, 7), (3, 128, 2))
    groups, width = make_groups(specs)
    assert [(len(group.layer_names), group.sliding_window) for group in groups] == [
        (2, 0), (3, 1024), (3, 1024), (1, 1024),
    ]  # fmt: skip
    assert width == specs[0].bytes_per_token * 2
    used = sum(layer.bytes_per_token for layer in specs)
    assert used / (len(groups) * width) == pytest.approx(20 / 24)


def test_layers_of_one_window_share_blocks_whatever_their_shapes() -> None:
    specs = [*layers(2), *(msgspec.structs.replace(one, name=f"n{one.name}") for one in layers(2, key_dim=64))]
    groups, width = make_groups(specs)
    assert [group.layer_names for group in groups] == [("0.0", "0.1", "n0.0", "n0.1")]
    assert width == sum(layer.bytes_per_token for layer in specs)


def test_a_few_layers_more_than_fit_do_not_double_the_groups() -> None:
    """Gemma 3 1B: 22 layers with a window and 4 without. 13 groups of 2 would leave nothing empty, 7 leave 2 of 28."""
    groups, width = make_groups([*layers(4), *layers(22, window=512)])
    assert [len(group.layer_names) for group in groups] == [4, 4, 4, 4, 4, 4, 2]
    assert width == 4 * 4096


def draft(count: int, *, window: int = 0, **changes: Any) -> list[LayerSpec]:
    return [
        msgspec.structs.replace(layer, name=f"draft.{layer.name}") for layer in layers(count, window=window, **changes)
    ]


def test_layers_of_a_draft_join_the_targets_and_a_block_costs_the_sum() -> None:
    alone = plan_cache(measured(64, layers(2)), asked(memory_bytes=GIB))
    plan = plan_cache(measured(64, [*layers(2), *draft(1, key_dim=32, value_dim=32)]), asked(memory_bytes=GIB))
    assert [group.layer_names for group in plan.groups] == [("0.0", "0.1", "draft.0.0")]
    assert plan.num_blocks == GIB // (16 * (2 * 4096 + 1024)) < alone.num_blocks


def test_a_drafts_windows_join_equal_ones_or_full_attention() -> None:
    target = [*layers(2), *layers(4, window=128)]
    specs = [*target, *draft(1), *draft(2, window=128), *draft(1, window=64)]
    groups, bytes_per_token = make_groups(specs)
    assert [(group.layer_names[2:], group.sliding_window) for group in groups] == [
        (("draft.0.0", "draft.64.0"), 0),
        (("draft.128.0",), 128),
        (("draft.128.1",), 128),
    ]
    # four layers in the group with the most: layers of one shape share tensors, whosever they are
    assert bytes_per_token == 4 * 4096


def test_a_draft_that_keeps_more_than_any_group_of_the_target_has_one_of_its_own() -> None:
    groups, bytes_per_token = make_groups([*layers(2, window=128), *draft(2), *draft(1, window=64)])
    assert [(group.layer_names, group.sliding_window) for group in groups] == [
        (("128.0", "128.1"), 128),
        (("draft.0.0", "draft.0.1", "draft.64.0"), 0),
    ]
    assert bytes_per_token == 3 * 4096


def test_more_than_there_is_cannot_be_asked_for() -> None:
    with pytest.raises(
        CapacityError,
        match=r"1,000,000,000 blocks \(num_gpu_blocks_override\) need .* 64.0 GiB is available.*blocks fit: "
        r"lower num_gpu_blocks_override to \d+, or leave it out",
    ):
        plan_cache(measured(64, layers(2)), asked(num_blocks=10**9))
    with pytest.raises(CapacityError, match=f"lower kv_cache_memory_bytes to {64 * GIB}, or"):
        plan_cache(measured(64, layers(2)), asked(memory_bytes=2**50))


def test_what_an_encoder_made_has_blocks_that_never_grow():
    """Cross attention keeps the first 10 tokens of a sequence, and the text's attention to itself those behind them."""
    groups, _ = make_groups([*layers(1, part=SOURCE), *layers(1, part=TEXT)], 16)
    heard, text = (group.behind(10) for group in groups)
    for num_tokens in (1, 8, 10, 11, 40):
        of_sound = range(-(-min(num_tokens, 10) // 4))
        assert heard.kept_blocks(0, heard.num_blocks(num_tokens, 4), 4) == of_sound
        assert heard.most_blocks(num_tokens, 4, 4) == len(of_sound)
    assert [text.most_blocks(num_tokens, 4, 4) for num_tokens in (8, 10, 12, 13, 20)] == [0, 1, 1, 2, 3]
    assert [list(heard.written_at(position, 4)) for position in (0, 9, 10, 11)] == [[0], [2], [], []]
    assert [list(text.written_at(position, 4)) for position in (0, 9, 10, 12)] == [[], [], [2], [3]]
    assert [text.first_needed_block(num_tokens, 4) for num_tokens in (0, 8, 10, 11, 20)] == [2, 2, 2, 2, 2]
    assert heard.first_needed_block(40, 4) == 0
    # wherever one ends and the other begins, which is in one block of both at worst
    of_all = [sum(group.behind(num_sources).most_blocks(40, 4, 4) for group in groups) for num_sources in range(1, 40)]
    assert most_blocks_of(groups, 40, 4, 4) == max(of_all) == 11

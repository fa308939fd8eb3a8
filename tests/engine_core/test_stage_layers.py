"""One plan of blocks for stages that keep some layers each."""

import pytest

from quire.engine_core.kv_cache_manager.capacity import CacheOptions, largest_part, plan_cache
from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.messages import LayerSpec, WorkerCapacity
from quire.state_layout import state_layout

BLOCK_SIZE = 16


def layer(name, **fields):
    sizes = {"num_kv_heads": 1, "key_dim": 4, "value_dim": 4, "bytes_per_element": 4}
    return LayerSpec(name=name, **{**sizes, **fields})


def state(name, num_bytes):
    return layer(name, num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0, state_bytes=num_bytes)


def part(stages):
    layers = [one for stage in stages for one in stage]
    groups, _ = make_groups(layers, BLOCK_SIZE)
    return largest_part(layers, list(map(len, stages)), groups, BLOCK_SIZE)


def test_a_block_counts_as_much_as_it_takes_on_the_largest_stage():
    layers = [layer(str(number)) for number in range(5)]
    of_one = layers[0].bytes_per_token * BLOCK_SIZE
    assert part([layers]) == 5 * of_one
    assert part([layers[:2], layers[2:]]) == 3 * of_one
    assert part([layers[:1], layers[1:2], layers[2:]]) == 3 * of_one


def test_a_stage_without_attention_cuts_its_states_into_as_many_pieces_as_there_are_blocks():
    # of the only layer of attention a block has 512 bytes: two blocks for each state
    assert part([[state("0", 1000), state("1", 1000)], [state("2", 1000), layer("3")]]) == 512


def test_the_plan_fills_the_memory_of_that_stage():
    layers = [layer(str(number)) for number in range(3)]
    bytes_of_part = 2 * layers[0].bytes_per_token * BLOCK_SIZE
    measured = WorkerCapacity(
        layers=layers, available_bytes=100 * bytes_of_part, explanation="", num_layers_of_stages=[1, 2]
    )
    options = CacheOptions(
        block_size=BLOCK_SIZE, max_model_len=64, may_lower_max_model_len=False, max_num_seqs=4, step_tokens=64,
        num_blocks=None, memory_bytes=100 * bytes_of_part, is_cpu=True,
    )  # fmt: skip
    assert plan_cache(measured, options).num_blocks == 100


@pytest.mark.parametrize("sizes", [[1000, 1000], [4096, 64], [64], [100_000, 3, 50_000]])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 40])
def test_states_fit_into_the_blocks_that_there_are(sizes, num_blocks):
    layers = [state(str(number), size) for number, size in enumerate(sizes)]
    layout = state_layout(layers, [], BLOCK_SIZE, num_blocks)
    assert layout.num_blocks <= num_blocks
    for one in layers:
        last = layout.first_chunk_by_layer[one.name] + -(-one.state_bytes // layout.chunk_bytes) - 1
        entry, place = layout.place_of(last)
        assert entry < layout.num_blocks
        assert place < layout.num_places

"""Cutting and joining a quantised weight never changes a number of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker import kernels
from quire.worker.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, TensorParallelGroup
from quire.worker.layers.parameter import load_weight, take_quantized
from quire.worker.layers.quantization import GroupBorderError, QuantizedWeight, concatenate
from quire.worker.layers.ranks import tensor_parallel


def make(num_rows=6, num_columns=128, group=32, bits=4, *, has_offsets=True, weight_only=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-(2 ** (bits - 1)), 2 ** (bits - 1), torch.int8)
    values = torch.randint(low, high, (num_rows, num_columns), generator=generator).to(dtype)
    scales = torch.rand(num_rows, num_columns // group, generator=generator) + 0.5
    offsets = torch.randn(num_rows, num_columns // group, generator=generator) if has_offsets else None
    return QuantizedWeight(values, scales, offsets, bits=bits, weight_only=weight_only)


def floats(weight):
    return weight.dequantize(torch.float32)


def test_a_weight_is_scales_times_values_plus_offsets():
    weight = make(num_rows=3, num_columns=64, group=32)
    for row in range(3):
        for column in range(64):
            group = column // 32
            expected = weight.scales[row, group] * weight.values[row, column] + weight.offsets[row, group]
            assert floats(weight)[row, column] == expected
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


@given(st.sampled_from([(4, 32), (4, 64), (4, 128), (6, 16), (6, 128), (8, 16), (8, 128)]), st.booleans(), st.data())
def test_every_cut_and_change_of_groups_keeps_the_numbers(kind, has_offsets, data):
    bits, group = kind
    weight = make(bits=bits, group=group, has_offsets=has_offsets)
    whole = floats(weight)
    row = data.draw(st.integers(0, 4))
    assert torch.equal(floats(weight.narrow(0, row, 2)), whole[row : row + 2])
    place = data.draw(st.sampled_from([0, 32, 64, 96]))
    assert torch.equal(floats(weight.narrow(1, place, 32)), whole[:, place : place + 32])
    assert torch.equal(floats(weight.widened()), whole)
    assert torch.equal(floats(weight.regrouped(16)), whole)
    assert torch.equal(floats(weight.packable()), whole)
    index = torch.tensor([5, 0, 3])
    assert torch.equal(floats(weight.select_rows(index)), whole[index])


def test_a_cut_inside_of_a_group_makes_groups_smaller_up_to_a_limit():
    weight = make(num_columns=384, group=128)
    half = weight.narrow(1, 192, 192)
    assert half.group_size == 64
    assert torch.equal(floats(half), floats(weight)[:, 192:])
    with pytest.raises(GroupBorderError, match=r"16 to 64 .* groups of 128"):
        weight.narrow(1, 16, 48)
    channel = make(num_columns=128, group=128, bits=8)
    assert channel.narrow(1, 4, 12).group_size == 12


def test_groups_that_no_layout_has_become_ones_that_it_has():
    assert make(num_columns=512, group=256).packable().group_size == 128
    assert make(num_columns=192, group=96).packable().group_size == 32
    assert make(num_columns=192, group=192).packable().group_size == 192
    assert make(num_columns=128, group=16).packable().bits == 6


def test_an_offset_without_a_scale_becomes_a_scale():
    """Layouts keep an offset as a multiple of its scale, which there must be then."""
    weight = make(num_columns=64, group=32)
    weight.scales[1, 0] = weight.scales[2, 1] = 0.0
    weight.offsets[2, 1] = 0.0
    fitted = weight.packable()
    assert torch.equal(floats(fitted), floats(weight))
    assert fitted.scales[1, 0] != 0
    assert fitted.offsets[1, 0] == 0
    weight.scales[1, 0] = 1e-9 * weight.offsets[1, 0]
    assert torch.allclose(floats(weight.packable()), floats(weight), rtol=1e-4)
    assert (weight.packable().offsets.abs() <= weight.packable().scales.abs() * 2**14).all()


@pytest.mark.parametrize("bits", [6, 8])
def test_parts_of_different_formats_join_in_one_that_holds_both(bits):
    query, key = make(bits=4, group=64, seed=1), make(num_rows=4, bits=bits, group=16, has_offsets=False, seed=2)
    joined = concatenate([query, key])
    assert (joined.bits, joined.group_size, joined.weight_only) == (bits, 16, True)
    assert torch.equal(floats(joined), torch.cat((floats(query), floats(key))))
    alike = concatenate([make(has_offsets=False), make(has_offsets=False, weight_only=False)])
    assert alike.bits == 4
    assert alike.offsets is None
    assert alike.weight_only


# ---- in layers ------------------------------------------------------------------------------------------------------


def rank(index, size):
    return tensor_parallel(TensorParallelGroup(index, size))


@pytest.mark.parametrize("make_layer", [lambda: ColumnParallelLinear(128, 8), lambda: RowParallelLinear(128, 8)])
def test_ranks_own_pieces_that_make_up_the_whole(make_layer):
    weight = make(num_rows=8)
    pieces = []
    for index in range(2):
        with rank(index, 2):
            layer = make_layer()
        load_weight(layer.weight, weight)
        pieces.append(floats(take_quantized(layer.weight)))
    dim = 0 if pieces[0].shape[0] == 4 else 1
    assert torch.equal(torch.cat(pieces, dim), floats(weight))


@pytest.mark.parametrize("kind", [{}, {"has_offsets": False, "bits": 8}, {"bits": 8, "group": 128}])
def test_a_rank_packs_its_piece(kind):
    """It is a view of the whole weight, which no kernel takes as it is."""
    weight = make(num_rows=8, **kind)
    for index in range(2):
        with rank(index, 2):
            layer = RowParallelLinear(128, 8, bias=False)
        load_weight(layer.weight, weight)
        layer.pack_weights()
        found = kernels.unpack_weight(layer.packed)
        torch.testing.assert_close(found, floats(weight.narrow(1, 64 * index, 64)), atol=2e-2, rtol=1e-3)


def test_parts_of_a_merged_layer_are_in_the_order_of_its_rows():
    layer = QKVParallelLinear(128, head_dim=4, num_heads=2, num_kv_heads=1, bias=False)
    query, key, value = make(num_rows=8, seed=1), make(num_rows=4, seed=2), make(num_rows=4, seed=3)
    for part, weight in (("v", value), ("q", query), ("k", key)):
        load_weight(layer.weight, weight, part)
    taken = take_quantized(layer.weight)
    assert torch.equal(floats(taken), torch.cat([floats(weight) for weight in (query, key, value)]))
    assert take_quantized(layer.weight) is None


def test_where_one_part_is_not_quantised_all_become_floats():
    layer = QKVParallelLinear(128, head_dim=4, num_heads=2, num_kv_heads=1, bias=False)
    query, key, value = make(num_rows=8, seed=1), torch.randn(4, 128), make(num_rows=4, seed=3)
    for part, weight in (("q", query), ("k", key), ("v", value)):
        load_weight(layer.weight, weight, part)
    assert take_quantized(layer.weight) is None
    assert torch.equal(layer.weight.data, torch.cat((floats(query), key, floats(value))))

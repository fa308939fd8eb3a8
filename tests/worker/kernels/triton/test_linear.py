"""Products of packed weights in Triton: the contracts of `linear_contracts.py`, and what is of this home alone."""

from functools import partial

import pytest
import torch

from quire.testing import linear_contracts as contracts
from quire.testing.linear_contracts import DTYPES, QUANTIZED_CASES, SHAPES, QuantizedCase
from quire.worker.kernels import reference

# A case of each way through the kernel; all of them run at night.
SOME = [
    QuantizedCase(8, (70, 1000)),
    QuantizedCase(8, (33, 256), 2, "each", is_signed=False),
    QuantizedCase(4, (130, 384), 3, "same", is_signed=False),
    QuantizedCase(4, (33, 64), 2, is_signed=True, is_weight_only=True),
    QuantizedCase(4, (40, 192), 2, "each", is_signed=False, is_weight_only=True),
    QuantizedCase(8, (33, 64), 16),
    QuantizedCase(6, (40, 192), 6, "each"),
]


def test_floats(triton_kernels):
    contracts.check_float_weight(triton_kernels, (70, 100), torch.bfloat16)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_codes(triton_kernels, case):
    contracts.check_quantized_weight(triton_kernels, case)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_floats(triton_kernels, shape, dtype):
    contracts.check_float_weight(triton_kernels, shape, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=str)
def test_all_codes(triton_kernels, case):
    contracts.check_quantized_weight(triton_kernels, case)


def whole_numbers(*shape, seed=0):
    """Few and small ones: sums of them are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_spans_side_by_side_and_in_turn(triton_kernels, bits):
    """Few rows and many take two ways. A span that is missed or taken twice would show."""
    weight = whole_numbers(70, 2100)
    if bits is None:
        packed = triton_kernels.pack_weight(weight)
    else:
        is_4_bits = bits == 4
        values = (weight + 8).to(torch.uint8) if is_4_bits else weight.to(torch.int8)
        offsets = torch.full((70, 1), -8.0) if is_4_bits else None
        packed = triton_kernels.pack_quantized(values, torch.ones(70, 1), offsets, bits=bits, weight_only=True)
    x = whole_numbers(80, 2100, seed=1)
    bias = whole_numbers(70, seed=2)
    for count in (3, 80):
        assert torch.equal(triton_kernels.packed_linear(x[:count], packed, bias, 70), x[:count] @ weight.T + bias)


def test_inputs_may_be_views(triton_kernels):
    weight = whole_numbers(40, 24)
    packed = triton_kernels.pack_weight(weight)
    wide = torch.full((6, 5, 40), torch.nan)
    wide[..., 8:32] = whole_numbers(6, 5, 24, seed=1)
    views = wide[:, 1:4, 8:32]
    assert torch.equal(triton_kernels.packed_linear(views, packed, None, 40), views @ weight.T)


def test_a_weight_without_inputs(triton_kernels):
    packed = triton_kernels.pack_weight(torch.empty(40, 0))
    bias = torch.arange(40.0)
    found = triton_kernels.packed_linear(torch.empty(5, 0), packed, bias, 40)
    assert torch.equal(found, bias.expand(5, 40))


def test_what_it_cannot_multiply_is_refused(triton_kernels):
    with pytest.raises(ValueError, match="packed for the reference"):
        triton_kernels.packed_linear(torch.ones(1, 8), reference.pack_weight(torch.ones(4, 8)), None, 4)
    pack = partial(triton_kernels.pack_quantized, bits=4, weight_only=True)
    with pytest.raises(ValueError, match="values of 4 bits in int8"):
        pack(torch.full((4, 32), 5, dtype=torch.int8), torch.ones(4, 1), None)


def test_rows_that_are_elsewhere_are_zeros(triton_kernels):
    table = torch.randn(40, 8)
    packed = triton_kernels.pack_weight(table)
    ids = torch.tensor([99, 100, 139, 140, 0])
    expected = torch.stack([torch.zeros(8), table[0], table[39], torch.zeros(8), torch.zeros(8)])
    assert torch.equal(triton_kernels.packed_rows(packed, ids, torch.float32, 8, 100), expected)


def test_each_weight_of_several_may_lie_behind_another(triton_kernels):
    """Heads of a latent layer are packed into one tensor."""
    weights = whole_numbers(3, 7, 20)
    packed = torch.cat([triton_kernels.pack_weight(weight) for weight in weights]).chunk(3)
    for weight, piece in zip(weights, packed, strict=True):
        assert torch.equal(triton_kernels.unpack_weight(piece), weight)


@pytest.mark.parametrize(("size", "bytes_a_scale"), [(1e-2, 2), (1e-20, 4), (1e9, 4)])
def test_scales_of_groups_take_half_where_it_holds_them(triton_kernels, size, bytes_a_scale):
    values = torch.ones(32, 128, dtype=torch.int8)
    scales = torch.linspace(1.0, 2.0, 32 * 4).view(32, 4) * size
    packed = triton_kernels.pack_quantized(values, scales, None, bits=8, weight_only=True)
    assert len(packed) == 64 + 32 * 128 + 32 * 4 * bytes_a_scale
    found = triton_kernels.unpack_weight(packed)
    torch.testing.assert_close(found, scales.repeat_interleave(32, dim=1), rtol=2.0**-11, atol=0.0)

"""The projection of latent attention, in both directions."""

import pytest
import torch

from quire.worker.kernels import cpu
from quire.worker.layers import LatentProjection, latent_parts
from quire.worker.layers.parameter import load_weight
from quire.worker.layers.quantization import QuantizedWeight, find_scheme

HEADS, LATENT, KEY, VALUE = 3, 96, 64, 32


def checkpoint_weight():
    return torch.randn(HEADS * (KEY + VALUE), LATENT, generator=torch.Generator().manual_seed(0))


def projection(weight=None, scheme=None):
    """As the loader makes it. `scheme`: of both directions."""
    layer = LatentProjection(LATENT, HEADS, KEY, VALUE)
    weight = checkpoint_weight() if weight is None else weight
    for name, part in latent_parts(KEY, VALUE)("layers.0.kv_b_proj.weight", weight):
        _, direction, _ = name.rsplit(".", 2)
        quantized = part if scheme is None else find_scheme(scheme).quantize(part, "linear")
        load_weight(getattr(layer, direction).weight, quantized)
    return layer


def packed(layer):
    layer.keys.pack_weights()
    layer.values.pack_weights()
    return layer


def inputs():
    generator = torch.Generator().manual_seed(1)
    # the head of a query is a slice of a wider one
    return torch.randn(5, HEADS, KEY + 8, generator=generator)[..., :KEY], torch.randn(
        5, HEADS, LATENT, generator=generator
    )


def expected(weight):
    """Queries of latent vectors, and values, from keys and values that are expanded."""
    query_THK, latent_THL = inputs()
    keys_HKL, values_HVL = weight.view(HEADS, KEY + VALUE, LATENT).split([KEY, VALUE], dim=1)
    # the score of a latent vector is the one of the key that it stands for
    scores_TH = torch.einsum("thk,hk->th", query_THK, keys_HKL @ latent_THL[0, 0])
    return scores_TH, torch.einsum("hvl,thl->thv", values_HVL, latent_THL)


def check(layer, weight, *, atol):
    query_THK, latent_THL = inputs()
    scores_TH, values_THV = expected(weight)
    torch.testing.assert_close(layer.to_latent(query_THK) @ latent_THL[0, 0], scores_TH, rtol=1e-4, atol=atol)
    torch.testing.assert_close(layer.to_values(latent_THL), values_THV, rtol=1e-4, atol=atol)


def test_scores_and_outputs_are_those_of_expanded_keys_and_values():
    layer = projection()
    check(layer, checkpoint_weight(), atol=1e-3)
    check(packed(layer), checkpoint_weight(), atol=1e-3)


def test_other_tensors_of_a_checkpoint_are_left_alone():
    assert latent_parts(KEY, VALUE)("layers.0.kv_a_proj.weight", "anything") == [
        ("layers.0.kv_a_proj.weight", "anything")
    ]


@pytest.mark.parametrize(("scheme", "most"), [("int8_weight_only", 0.02), ("int4_weight_only", 0.4)])
def test_a_scheme_rounds_each_direction_as_it_is_multiplied(scheme, most):
    """The numbers are those of its codes, and near to those of the checkpoint."""
    layer = projection(scheme=scheme)
    exact = []
    for direction in (layer.keys, layer.values):
        (_, codes) = direction.weight.quire_quantized[0]
        exact.append(codes.dequantize(torch.float32).view(HEADS, direction.head_outputs, -1))
    rounded = torch.cat((exact[0].transpose(1, 2), exact[1]), dim=1).flatten(0, 1)
    assert 0 < (rounded - checkpoint_weight()).abs().max() < most
    check(packed(layer), rounded, atol=0.05)


def test_of_codes_of_a_checkpoint_values_stay_codes_and_keys_become_floats():
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-127, 128, (HEADS * (KEY + VALUE), LATENT), dtype=torch.int8, generator=generator)
    scales = torch.rand(len(codes), LATENT // 32, generator=generator) * 0.01
    weight = QuantizedWeight(codes, scales, None, bits=8, weight_only=True)
    parts = dict(latent_parts(KEY, VALUE)("layers.0.kv_b_proj.weight", weight))
    assert [type(part).__name__ for part in parts.values()] == ["Tensor", "QuantizedWeight"]
    check(packed(projection(weight)), weight.dequantize(torch.float32), atol=0.02)


@pytest.mark.skipif(not cpu.load(), reason="torch's own kernels promise no bits, and nothing is packed")
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_a_packed_weight_may_come_from_a_file_and_gives_a_token_its_bits(scheme):
    layer, other = packed(projection(scheme=scheme)), LatentProjection(LATENT, HEADS, KEY, VALUE)
    assert layer.keys.weight.numel() == layer.values.weight.numel() == 0
    other.keys.packed = layer.keys.packed.clone()
    other.values.packed = layer.values.packed.clone()
    packed(other)
    query_THK, latent_THL = inputs()
    assert torch.equal(other.to_latent(query_THK), layer.to_latent(query_THK))
    assert torch.equal(other.to_values(latent_THL), layer.to_values(latent_THL))
    # those that it has alone
    assert torch.equal(layer.to_latent(query_THK[2:3]), layer.to_latent(query_THK)[2:3])
    assert torch.equal(layer.to_values(latent_THL[2:3]), layer.to_values(latent_THL)[2:3])


def test_results_lie_in_one_piece_where_nothing_is_packed():
    """The model goes on with views of them."""
    layer = projection()
    query, latent = inputs()
    assert layer.to_latent(query).is_contiguous()
    assert layer.to_values(latent).is_contiguous()

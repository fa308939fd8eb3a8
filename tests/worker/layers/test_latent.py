"""The projection of latent attention, in both directions."""

import pytest
import torch

from quire.worker.kernels import cpu
from quire.worker.layers import LatentProjection

HEADS, LATENT, KEY, VALUE = 3, 40, 16, 24


def projection():
    layer = LatentProjection(LATENT, HEADS, KEY, VALUE)
    layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)))
    return layer


def inputs():
    generator = torch.Generator().manual_seed(1)
    # the head of a query is a slice of a wider one
    return torch.randn(5, HEADS, KEY + 8, generator=generator)[..., :KEY], torch.randn(
        5, HEADS, LATENT, generator=generator
    )


def test_scores_and_outputs_are_those_of_expanded_keys_and_values():
    layer = projection()
    query_THK, latent_THL = inputs()
    keys_HKL, values_HVL = layer.weight.data.clone().view(HEADS, KEY + VALUE, LATENT).split([KEY, VALUE], dim=1)
    plain = layer.to_latent(query_THK), layer.to_values(latent_THL)
    layer.pack_weights()
    for to_latent, to_values in (plain, (layer.to_latent(query_THK), layer.to_values(latent_THL))):
        # the score of a latent vector is the one of the key that it stands for
        latent_L = latent_THL[0, 0]
        expected = torch.einsum("thk,hk->th", query_THK, keys_HKL @ latent_L)
        torch.testing.assert_close(to_latent @ latent_L, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            to_values, torch.einsum("hvl,thl->thv", values_HVL, latent_THL), rtol=1e-4, atol=1e-4
        )


@pytest.mark.skipif(not cpu.load(), reason="torch's own kernels promise no bits, and nothing is packed")
def test_a_packed_weight_may_come_from_a_file():
    layer, other = projection(), LatentProjection(LATENT, HEADS, KEY, VALUE)
    layer.pack_weights()
    assert layer.weight.numel() == 0
    other.packed = layer.packed.clone()
    other.pack_weights()
    query_THK, latent_THL = inputs()
    assert torch.equal(other.to_latent(query_THK), layer.to_latent(query_THK))
    assert torch.equal(other.to_values(latent_THL), layer.to_values(latent_THL))
    # and a token's bits are those that it has alone
    assert torch.equal(layer.to_latent(query_THK[2:3]), layer.to_latent(query_THK)[2:3])
    assert torch.equal(layer.to_values(latent_THL[2:3]), layer.to_values(latent_THL)[2:3])

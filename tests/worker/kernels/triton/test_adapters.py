"""Adapters on a linear layer's output in Triton, against the specification."""

import pytest
import torch
from tests.worker.kernels.test_adapters import RANKS, case

from quire.testing.linear_contracts import ROUNDING
from quire.worker.kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("most_rank", "ranks"), RANKS)
@pytest.mark.parametrize("num_tokens", [0, 1, 20])
def test_add_adapters(triton_kernels, dtype, most_rank, ranks, num_tokens):
    y, x, *others = case(75, [33, 7, 5], dtype, num_tokens, most_rank=most_rank, ranks=ranks)
    expected = y.clone()
    reference.add_adapters(expected, x, *others)
    # slices of wider tensors, of which nothing else is touched
    wide_y = torch.full((num_tokens, 50), 7.0, dtype=dtype)
    wide_x = torch.full((num_tokens, 80), torch.nan, dtype=dtype)
    wide_y[:, :45] = y
    wide_x[:, 3:78] = x
    triton_kernels.add_adapters(wide_y[:, :45], wide_x[:, 3:78], *others)
    bound = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
    torch.testing.assert_close(wide_y[:, :45], expected, rtol=bound, atol=bound * 4)
    slots = others[0]
    assert torch.equal(wide_y[:, :45][slots < 0], y[slots < 0]), "a base row has changed"
    assert (wide_y[:, 45:] == 7.0).all()


def test_a_sum_that_is_not_finished_stays_in_float32(triton_kernels):
    y, *others = case(64, [96], torch.bfloat16, 9)
    expected = y.float()
    reference.add_adapters(expected, *others)
    found = y.float()
    triton_kernels.add_adapters(found, *others)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

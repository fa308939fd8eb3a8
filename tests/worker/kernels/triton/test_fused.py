"""The small operations in Triton against the reference."""

import pytest
import torch

from quire.testing import fused_contracts
from quire.testing.attention_cases import DTYPES
from quire.testing.kernel_contracts import assert_close
from quire.worker.kernels import reference

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def test_norms(triton_kernels, dtype):
    fused_contracts.check_norms(triton_kernels, dtype)


def test_gated_norms(triton_kernels, dtype):
    fused_contracts.check_gated_norms(triton_kernels, dtype)


def test_layer_norm(triton_kernels, dtype):
    x = torch.randn(5, 3, 80, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 1:]
    weight, bias = x[0, 0] + 1, x[1, 1].clone()
    for given in ((weight, bias), (weight, None), (None, None)):
        assert_close(triton_kernels.layer_norm(x, *given, 1e-5), reference.layer_norm(x, *given, 1e-5), factor=2)


def test_silu_and_mul(triton_kernels, dtype):
    fused_contracts.check_silu_and_mul(triton_kernels, dtype)


def test_clamped_swiglu(triton_kernels, dtype):
    fused_contracts.check_clamped_swiglu(triton_kernels, dtype)


def test_rotary_embedding(triton_kernels, dtype):
    fused_contracts.check_rotary_embedding(triton_kernels, dtype)

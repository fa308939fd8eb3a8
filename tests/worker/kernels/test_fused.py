"""The small operations: the reference against Transformers, the C++ twin against the reference."""

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from quire.testing import fused_contracts
from quire.testing.attention_cases import DTYPES
from quire.testing.kernel_contracts import assert_close
from quire.worker.kernels import reference

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def test_norms(cpu_kernels, dtype):
    fused_contracts.check_norms(cpu_kernels, dtype)


def test_gated_norms(cpu_kernels, dtype):
    fused_contracts.check_gated_norms(cpu_kernels, dtype)


def test_conversions(cpu_kernels, dtype):
    fused_contracts.check_conversions(cpu_kernels, dtype)


def test_silu_and_mul(cpu_kernels, dtype):
    fused_contracts.check_silu_and_mul(cpu_kernels, dtype)


def test_clamped_swiglu(cpu_kernels, dtype):
    fused_contracts.check_clamped_swiglu(cpu_kernels, dtype)


def test_rotary_embedding(cpu_kernels, dtype):
    fused_contracts.check_rotary_embedding(cpu_kernels, dtype)


def test_join(cpu_kernels, dtype):
    fused_contracts.check_join(cpu_kernels, dtype)


def test_reference_norm_is_that_of_transformers(dtype):
    norm = LlamaRMSNorm(256, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(9, 256).to(dtype)
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5), norm(x))


def test_reference_rotation_is_that_of_transformers(dtype):
    angle = torch.randn(6, 32) * 20
    query, key = torch.randn(6, 4, 64).to(dtype), torch.randn(6, 2, 64).to(dtype)
    cos, sin = (torch.cat((f(angle), f(angle)), -1)[None].to(dtype) for f in (torch.cos, torch.sin))
    expected_query, expected_key = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin
    )
    reference.rotary_embedding(torch.arange(6), query, key, torch.cat((angle.cos(), angle.sin()), -1))
    # Transformers rounds cosine, sine and both products: a few units in the last place.
    assert_close(query, expected_query[0].transpose(0, 1).contiguous(), factor=4)
    assert_close(key, expected_key[0].transpose(0, 1).contiguous(), factor=4)


def test_reference_rotation_of_interleaved_pairs_is_that_of_transformers(dtype):
    angle = torch.randn(6, 32) * 20
    query, key = torch.randn(6, 4, 64).to(dtype), torch.randn(6, 2, 64).to(dtype)
    turns = torch.polar(torch.ones_like(angle), angle)[None]
    expected = apply_rotary_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], turns)
    reference.rotary_embedding(torch.arange(6), query, key, torch.cat((angle.cos(), angle.sin()), -1), True)
    assert_close(query, expected[0][0].transpose(0, 1).contiguous())
    assert_close(key, expected[1][0].transpose(0, 1).contiguous())

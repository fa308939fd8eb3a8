"""What has no kernel of its own on a GPU runs the reference there."""

import pytest
import torch

from quire.testing import fused_contracts
from quire.testing import kernel_contracts as contracts
from quire.testing.attention_cases import ATTENTION_CASES, DTYPES, ONES, AttentionCase
from quire.worker import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("case", ATTENTION_CASES[::5], ids=str)
def test_attention(case):
    contracts.check_write_kv(kernels, case, "cuda")
    contracts.check_paged_attention(kernels, case, "cuda")
    if not case.soft_cap and not case.has_sinks:
        contracts.check_reference_attention(case, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operations(dtype):
    contracts.check_copy_blocks(kernels, dtype, "cuda")
    contracts.check_move_blocks(kernels, dtype, "cuda", "cuda")
    contracts.check_move_blocks(kernels, dtype, "cuda", "cpu")
    fused_contracts.check_norms(kernels, dtype, "cuda")
    fused_contracts.check_silu_and_mul(kernels, dtype, "cuda")
    fused_contracts.check_clamped_swiglu(kernels, dtype, "cuda")
    fused_contracts.check_rotary_embedding(kernels, dtype, "cuda")


def test_single_tokens_do_not_wait_for_the_device():
    batch = contracts.make_batch(AttentionCase(sequences=ONES), "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.attend(kernels)
        kernels.write_kv(batch.key_TKD, batch.value_TKE, batch.k_cache, batch.v_cache, batch.slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")

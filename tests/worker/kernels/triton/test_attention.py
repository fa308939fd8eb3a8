"""The kernels on the cache in Triton against the reference."""

import pytest
import torch

from quire.testing import kernel_contracts as contracts
from quire.testing.attention_cases import ATTENTION_CASES, CODES, DTYPES, AttentionCase


@pytest.mark.parametrize("case", ATTENTION_CASES[4::40], ids=str)
def test_attention_is_the_reference(triton_kernels, case):
    contracts.check_paged_attention(triton_kernels, case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_is_the_reference_in_all_cases(triton_kernels, case):
    contracts.check_paged_attention(triton_kernels, case)


INVARIANT_CASES = [
    AttentionCase(sequences=((4, 1030), (1, 70)), num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16),
    AttentionCase(sequences=((9, 60), (70, 70)), sliding_window=17, head_dim=80, has_sinks=True, soft_cap=10.0),
    AttentionCase(num_heads=16, num_kv_heads=1, head_dim=96, value_dim=80, dtype=torch.float16, values_in_keys=True),
    AttentionCase(sequences=((40, 70), (1, 60)), cache_dtype=torch.int8, head_dim=32, dtype=torch.bfloat16),
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", INVARIANT_CASES, ids=str)
def test_attention_is_invariant(triton_kernels, case):
    contracts.check_invariance(triton_kernels, case)


RANK_CASES = [
    AttentionCase(sequences=((60, 560), (9, 70), (1, 3)), sliding_window=3, has_sinks=True, soft_cap=10.0),
    AttentionCase(cache_dtype=torch.int8, head_dim=32, dtype=torch.bfloat16),
    AttentionCase(sequences=((30, 2100), (2, 2090)), head_dim=16, block_size=4),
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", RANK_CASES, ids=str)
def test_parts_of_ranks_are_the_whole(triton_kernels, case):
    contracts.check_attention_of_ranks(triton_kernels, case, 2)


SLICED_CASES = [
    AttentionCase(num_heads=3, num_kv_heads=1, head_dim=576, value_dim=512, values_in_keys=True, **case)
    for case in (
        {"sequences": ((1, 1030), (40, 60), (1, 3)), "dtype": torch.bfloat16},
        {"sequences": ((1, 40), (6, 6)), "dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn},
    )
] + [AttentionCase(sequences=((5, 40), (1, 9)), head_dim=300, has_sinks=True, dtype=torch.float16)]


@pytest.mark.parametrize("case", SLICED_CASES, ids=str)
def test_values_of_more_columns_than_a_program_has(triton_kernels, case):
    """Slices of them, in the widths of two devices."""
    from quire.worker.kernels.triton.launch import record_launches

    for target in ("sm_90", "sm_100"):
        with record_launches(target) as launches:
            contracts.check_paged_attention(triton_kernels, case)
            contracts.check_invariance(triton_kernels, case)
        assert {launch.arguments["num_slices"] for launch in launches} == {2 if target == "sm_90" else 4}


def test_a_rank_without_keys_that_are_seen(triton_kernels):
    """Its share is nothing, whatever lies behind its keys."""
    case = AttentionCase(sequences=((1, 41), (1, 2), (1, 40)), sliding_window=1, head_dim=16)
    contracts.check_attention_of_ranks(triton_kernels, case, 4)


def test_single_tokens_of_several_long_sequences(triton_kernels):
    """Their partitions are computed apart, and folded token by token."""
    case = AttentionCase(sequences=((1, 1030), (2, 40), (0, 5), (1, 1100)), num_heads=2, num_kv_heads=1, head_dim=16)
    contracts.check_paged_attention(triton_kernels, case)


@pytest.mark.nightly
def test_sequences_that_fill_the_device_are_not_split(triton_kernels):
    """As many as a device has places for: the few rows of each fold their own partitions."""
    case = AttentionCase(sequences=((1, 1030),) + ((1, 3),) * 140, num_heads=2, num_kv_heads=2, head_dim=16)
    contracts.check_paged_attention(triton_kernels, case)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(value_dim=24, block_size=1, dtype=torch.bfloat16),
        AttentionCase(dtype=torch.float32, cache_dtype=torch.bfloat16, value_dim=20),
        AttentionCase(num_kv_heads=1, value_dim=48, values_in_keys=True),
        *(AttentionCase(dtype=torch.bfloat16, cache_dtype=codes, head_dim=100) for codes in CODES),
    ],
    ids=str,
)
def test_write_kv(triton_kernels, case):
    contracts.check_write_kv(triton_kernels, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(triton_kernels, dtype):
    contracts.check_copy_blocks(triton_kernels, dtype)
    contracts.check_move_blocks(triton_kernels, dtype)


def test_what_is_empty_or_not_a_number(triton_kernels):
    batch = contracts.make_batch(AttentionCase(sequences=((3, 5), (1, 4), (1, 4))))
    batch.seq_lens_S[0] = 2  # the first of three rows has the position -1
    batch.query_THD[3] = float("nan")
    out = batch.attend(triton_kernels)
    assert (out[0] == 0).all()
    assert out[3].isnan().all()
    assert out[4].isfinite().all()


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_devices_that_do_not_know_the_codes_of_a_cache(triton_kernels, target):
    """Nor do they multiply as many rows at once."""
    from quire.worker.kernels.triton.launch import record_launches

    with record_launches(target):
        contracts.check_paged_attention(
            triton_kernels, AttentionCase(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, head_dim=32)
        )

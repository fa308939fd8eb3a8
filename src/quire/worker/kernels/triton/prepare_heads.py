"""Norms of heads, positions and the write into the cache, in one kernel. A program is one token and one head, of the
query or of the keys; that of a key has its value as well."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.cache_format import row_elements
from quire.worker.kernels.triton.cache import numbers_and_scales
from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of
from quire.worker.kernels.triton.write_kv import CODE_NAMES, write_row


@triton.jit
def _scaled(number, weight, factor):
    """Rounded before the weight, as in `rms_norm`."""
    rounded = (number.to(tl.float32) * factor).to(number.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(number.dtype)


@triton.jit
def _turn_head(
    row, weight, cos, sin, dim, half, eps,
    has_norm: tl.constexpr, is_interleaved: tl.constexpr, block_dim: tl.constexpr, block_half: tl.constexpr,
):  # fmt: skip
    """In place. What a thread stores it has loaded, or all threads have summed up before."""
    column = tl.arange(0, block_half)
    is_real = column < half
    if is_interleaved:
        first_column = 2 * column
        second_column = first_column + 1
    else:
        first_column = column
        second_column = column + half
    first = tl.load(row + first_column, is_real, 0.0)
    second = tl.load(row + second_column, is_real, 0.0)
    if has_norm:
        every = tl.arange(0, block_dim)
        is_every = every < dim
        number = tl.load(row + every, is_every, 0.0)
        wide = number.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide) / dim + eps)
        # dimensions behind those that turn
        rest = _scaled(number, tl.load(weight + every, is_every, 0.0), factor)
        tl.store(row + every, rest, is_every & (every >= 2 * half))
        first = _scaled(first, tl.load(weight + first_column, is_real, 0.0), factor)
        second = _scaled(second, tl.load(weight + second_column, is_real, 0.0), factor)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    tl.store(row + first_column, (wide_first * cos - wide_second * sin).to(first.dtype), is_real)
    tl.store(row + second_column, (wide_second * cos + wide_first * sin).to(first.dtype), is_real)


@triton.jit(do_not_specialize=["positions", "slots"])
def _prepare_heads(
    positions, query, key, value, query_weight, key_weight, cos_sin, k_cache, v_cache, k_scales, v_scales, slots,
    query_token, query_head, key_token, key_head, value_token, value_head, table_row,
    k_block, k_head, k_place, v_block, v_head, v_place, ks_block, ks_head, vs_block, vs_head,
    num_heads, dim, value_dim, half, block_size, eps,
    has_query_norm: tl.constexpr, has_key_norm: tl.constexpr, is_interleaved: tl.constexpr, codes: tl.constexpr,
    block_dim: tl.constexpr, block_half: tl.constexpr, block_value: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, block_half)
    line = cos_sin + tl.load(positions + token).to(tl.int64) * table_row + column
    cos = tl.load(line, column < half, 0.0)
    sin = tl.load(line + half, column < half, 0.0)
    if head < num_heads:
        _turn_head(
            query + token * query_token + head * query_head, query_weight, cos, sin, dim, half, eps,
            has_query_norm, is_interleaved, block_dim, block_half,
        )  # fmt: skip
    else:
        head -= num_heads
        _turn_head(
            key + token * key_token + head * key_head, key_weight, cos, sin, dim, half, eps,
            has_key_norm, is_interleaved, block_dim, block_half,
        )  # fmt: skip
        # what a thread has written another may read
        tl.debug_barrier()
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            block = slot // block_size
            place = slot % block_size
            write_row(
                key, k_cache, k_scales, key_token, key_head, k_block, k_head, k_place, ks_block, ks_head,
                token, head, block, place, dim, codes, block_dim,
            )  # fmt: skip
            write_row(
                value, v_cache, v_scales, value_token, value_head, v_block, v_head, v_place, vs_block, vs_head,
                token, head, block, place, value_dim, codes, block_value,
            )  # fmt: skip


def prepare_heads(
    positions_T: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKE: Tensor,
    query_weight_D: Tensor | None,
    key_weight_D: Tensor | None,
    eps: float,
    cos_sin_cache_PR: Tensor,
    is_interleaved: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
) -> None:
    num_heads, dim = query_THD.shape[1:]
    num_kv_heads, value_dim = value_TKE.shape[1:]
    half = cos_sin_cache_PR.shape[-1] // 2
    k_numbers, k_scales = numbers_and_scales(k_cache, has_fp8=False)
    v_numbers, v_scales = numbers_and_scales(v_cache, has_fp8=False)
    launch(
        _prepare_heads,
        (len(positions_T), num_heads + num_kv_heads),
        positions_T,
        query_THD,
        key_TKD,
        value_TKE,
        # what is not there is never read
        query_THD if query_weight_D is None else query_weight_D.contiguous(),
        key_TKD if key_weight_D is None else key_weight_D.contiguous(),
        cos_sin_cache_PR,
        k_numbers,
        v_numbers,
        k_scales,
        v_scales,
        slots_T,
        *query_THD.stride()[:2],
        *key_TKD.stride()[:2],
        *value_TKE.stride()[:2],
        cos_sin_cache_PR.stride(0),
        *k_numbers.stride()[:3],
        *v_numbers.stride()[:3],
        *k_scales.stride()[:2],
        *v_scales.stride()[:2],
        num_heads,
        dim,
        value_dim,
        half,
        k_cache.shape[2],
        eps,
        has_query_norm=query_weight_D is not None,
        has_key_norm=key_weight_D is not None,
        is_interleaved=is_interleaved,
        codes=CODE_NAMES.get(k_cache.dtype, ""),
        block_dim=block_of(dim),
        block_half=block_of(half),
        block_value=block_of(value_dim),
        num_warps=1,
    )


def _example(num_tokens: int, has_norms: bool, cache_dtype: torch.dtype) -> None:
    """8B: query, key and value lie side by side."""
    fused = floats(num_tokens, 48, 128)
    weight = floats(128) if has_norms else None
    shape = 1000, 8, 16, row_elements(128, cache_dtype)
    prepare_heads(
        given(range(num_tokens)),
        fused[:, :32],
        fused[:, 32:40],
        fused[:, 40:],
        weight,
        weight,
        1e-6,
        floats(8192, 128, dtype=torch.float32),
        False,
        floats(*shape, dtype=cache_dtype),
        floats(*shape, dtype=cache_dtype),
        given(range(num_tokens)),
    )


# Of a token: heads of query and keys are read and written, values read, both written to the cache.
_TOKEN_BYTES = (2 * 40 + 8 + 16) * 256 + 512
EXAMPLES = (
    Example("one token of 8B", lambda: _example(1, has_norms=False, cache_dtype=torch.bfloat16), _TOKEN_BYTES),
    Example("a prompt of 8B", lambda: _example(2048, has_norms=True, cache_dtype=torch.bfloat16), 2048 * _TOKEN_BYTES),
    Example(
        "eight-bit floats",
        lambda: _example(2048, has_norms=True, cache_dtype=torch.float8_e4m3fn),
        2048 * (_TOKEN_BYTES - 16 * (256 - 132)),
    ),
)

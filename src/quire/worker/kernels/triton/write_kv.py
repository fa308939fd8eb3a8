"""Store the keys and values of a step in the paged cache. A program is one token and head."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.cache_format import row_elements
from quire.worker.kernels.triton.cache import numbers_and_scales
from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of

# What kernels call the types of codes.
CODE_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@triton.jit
def write_row(
    rows, cache, scales, row_stride, head_stride, block_stride, cache_head, place_stride, scale_block, scale_head,
    token, head, block, place, dim, codes: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block_dim)
    is_real = column < dim
    numbers = tl.load(rows + token * row_stride + head * head_stride + column, is_real, 0.0)
    target = cache + block * block_stride + head * cache_head + place * place_stride + column
    if codes == "":
        tl.store(target, numbers.to(tl.float32).to(cache.dtype.element_ty), is_real)
    else:
        # the format and its odd rows: cache_format.py
        numbers = numbers.to(tl.float32)
        size = tl.abs(numbers)
        is_finite = tl.min(tl.where(size < float("inf"), 1, 0)) == 1
        largest = tl.max(size)
        is_usable = is_finite & (largest >= 1e-30)
        largest_code: tl.constexpr = 127.0 if codes == "int8" else 448.0
        divisor = tl.where(is_usable, largest, 1.0)
        factor = tl.where(is_usable, tl.div_rn(largest_code + 0.0 * divisor, divisor), 0.0)
        scaled = tl.where(is_usable, numbers * factor, 0.0)
        if codes == "int8":
            tl.store(target, _nearest(scaled).to(tl.int8), is_real)
        else:
            scaled = tl.where(tl.abs(scaled) >= 0.015625, scaled, 0.0)
            tl.store(target, _eight_bits(scaled), is_real)
        zero_or_nan = tl.where(is_finite, 0.0, float("nan"))
        scale = tl.where(is_usable, tl.div_rn(largest, largest_code + 0.0 * divisor), zero_or_nan)
        tl.store(scales + block * scale_block + head * scale_head + place, scale)


@triton.jit
def _nearest(number):
    """The nearest whole number, of two equally near the even one; not far from zero."""
    return (number + 12582912.0) - 12582912.0


@triton.jit
def _eight_bits(number):
    """The byte of the nearest float e4m3, of zero or of what is at least its least normal number and at most 448."""
    bits = number.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # to 3 bits behind the point, of two equally near to the even one
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    code = tl.where(size == 0, 0, rounded - (120 << 3))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["slots"])
def _write_kv(
    key, value, k_cache, v_cache, k_scales, v_scales, slots,
    key_token, key_head, value_token, value_head, k_block, k_head, k_place, v_block, v_head, v_place,
    ks_block, ks_head, vs_block, vs_head, rank, size, key_dim, value_dim, block_size,
    has_value: tl.constexpr, codes: tl.constexpr, block_key: tl.constexpr, block_value: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot < 0) | (slot % size != rank):
        return
    slot = slot // size
    block = slot // block_size
    place = slot % block_size
    write_row(
        key, k_cache, k_scales, key_token, key_head, k_block, k_head, k_place, ks_block, ks_head,
        token, head, block, place, key_dim, codes, block_key,
    )  # fmt: skip
    if has_value:
        write_row(
            value, v_cache, v_scales, value_token, value_head, v_block, v_head, v_place, vs_block, vs_head,
            token, head, block, place, value_dim, codes, block_value,
        )  # fmt: skip


def write_kv(
    key_TKD: Tensor,
    value_TKE: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    rank: int = 0,
    size: int = 1,
) -> None:
    value = key_TKD if value_TKE is None else value_TKE
    k_numbers, k_scales = numbers_and_scales(k_cache, has_fp8=False)
    v_numbers, v_scales = numbers_and_scales(v_cache, has_fp8=False)
    block = block_of(max(key_TKD.shape[2], value.shape[2]))
    launch(
        _write_kv,
        (len(slots_T), key_TKD.shape[1]),
        key_TKD,
        value,
        k_numbers,
        v_numbers,
        k_scales,
        v_scales,
        slots_T,
        *key_TKD.stride()[:2],
        *value.stride()[:2],
        *k_numbers.stride()[:3],
        *v_numbers.stride()[:3],
        *k_scales.stride()[:2],
        *v_scales.stride()[:2],
        rank,
        size,
        key_TKD.shape[2],
        value.shape[2],
        k_cache.shape[2],
        has_value=value_TKE is not None,
        codes=CODE_NAMES.get(k_cache.dtype, ""),
        block_key=block_of(key_TKD.shape[2]),
        block_value=block_of(value.shape[2]),
        num_warps=max(1, block // 256),
    )


def _example(num_tokens: int, cache_dtype: torch.dtype, head_dim: int = 128, **options: Any) -> None:
    key, value = floats(num_tokens, 8, head_dim), floats(num_tokens, 8, head_dim)
    shape = 1000, 8, 16, row_elements(head_dim, cache_dtype)
    caches = floats(*shape, dtype=cache_dtype), floats(*shape, dtype=cache_dtype)
    write_kv(key, value, *caches, given(range(num_tokens)), **options)


_ROW_BYTES = 2 * 8 * 128 * 2
EXAMPLES = (
    Example("a prompt of 8B", lambda: _example(2048, torch.bfloat16), 2048 * 2 * _ROW_BYTES),
    Example("eight-bit integers", lambda: _example(2048, torch.int8), 2048 * (_ROW_BYTES + 2112)),
    Example("eight-bit floats", lambda: _example(2048, torch.float8_e4m3fn), 2048 * (_ROW_BYTES + 2112)),
)

"""Rotary position embedding, in place. A program is one token, all its heads of query and key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of, warps_of


@triton.jit
def _turn(
    x, head_stride, num_heads, cos, sin, column, half,
    is_interleaved: tl.constexpr, block_heads: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, block_heads)
    is_real = (head < num_heads)[:, None] & (column < half)[None]
    if is_interleaved:
        first_place = x + head[:, None] * head_stride + 2 * column[None]
        second_place = first_place + 1
    else:
        first_place = x + head[:, None] * head_stride + column[None]
        second_place = first_place + half
    first = tl.load(first_place, is_real, 0.0).to(tl.float32)
    second = tl.load(second_place, is_real, 0.0).to(tl.float32)
    tl.store(first_place, (first * cos[None] - second * sin[None]).to(x.dtype.element_ty), is_real)
    tl.store(second_place, (second * cos[None] + first * sin[None]).to(x.dtype.element_ty), is_real)


@triton.jit(do_not_specialize=["positions"])
def _rotary_embedding(
    positions, query, key, cos_sin, query_token, query_head, key_token, key_head, table_row,
    num_heads, num_kv_heads, half,
    is_interleaved: tl.constexpr, block_heads: tl.constexpr, block_kv_heads: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    row = cos_sin + tl.load(positions + token).to(tl.int64) * table_row + column
    cos = tl.load(row, column < half, 0.0)
    sin = tl.load(row + half, column < half, 0.0)
    _turn(query + token * query_token, query_head, num_heads, cos, sin, column, half,
          is_interleaved, block_heads)  # fmt: skip
    _turn(key + token * key_token, key_head, num_kv_heads, cos, sin, column, half,
          is_interleaved, block_kv_heads)  # fmt: skip


def rotary_embedding(
    positions_T: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    cos_sin_cache_PR: Tensor,
    is_interleaved: bool = False,
) -> None:
    half = cos_sin_cache_PR.shape[-1] // 2
    num_heads, num_kv_heads = query_THD.shape[1], key_TKD.shape[1]
    block, block_heads = block_of(half), block_of(num_heads)
    launch(
        _rotary_embedding,
        (len(positions_T),),
        positions_T,
        query_THD,
        key_TKD,
        cos_sin_cache_PR,
        *query_THD.stride()[:2],
        *key_TKD.stride()[:2],
        cos_sin_cache_PR.stride(0),
        num_heads,
        num_kv_heads,
        half,
        is_interleaved=is_interleaved,
        block_heads=block_heads,
        block_kv_heads=block_of(num_kv_heads),
        block=block,
        num_warps=min(warps_of(block_heads * block), 8),
    )


def _example(num_tokens: int, is_interleaved: bool) -> None:
    query = floats(num_tokens, 32, 128)
    table = floats(8192, 128, dtype=torch.float32)
    rotary_embedding(given(range(num_tokens)), query, floats(num_tokens, 8, 128), table, is_interleaved)


EXAMPLES = (
    Example("a prompt of 8B", lambda: _example(2048, is_interleaved=False), 2048 * (2 * 40 * 256 + 512)),
    Example("interleaved", lambda: _example(2048, is_interleaved=True), 2048 * (2 * 40 * 256 + 512)),
)

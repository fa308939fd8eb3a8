"""The gated delta rule, token by token: see the reference for the formulas.

A program has some columns of the matrix of one head and sequence, in registers from the first token to the last.
Columns do not meet, so a bit depends on nothing but its sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.sequence_states import bytes_of
from quire.worker.kernels.triton.example_inputs import floats, given, raw
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of
from quire.worker.kernels.triton.state_memory import place_of, states_of

_COLUMNS = 32


@triton.jit
def softplus(value):
    """As torch's: the identity where it would not differ."""
    return tl.where(value > 20.0, value, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))))


@triton.jit
def _sigmoid(value):
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def _normalised(row):
    return row * tl.rsqrt(tl.sum(row * row) + 1e-6)


@triton.jit(do_not_specialize=["starts", "num_kept"])
def _gated_delta_rule(
    query, key, value, a, b, a_log, dt_bias, chunks, starts, query_starts, num_kept, num_read, out,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    a_stride, b_stride, out_stride, out_head_stride,
    num_shared, key_dim, value_dim, scale, num_chunks, chunk_bytes,
    key_block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, key_block)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    is_row = row < key_dim
    is_column = column < value_dim
    is_real = is_row[:, None] & is_column[None, :]
    index = (head * key_dim + row[:, None]) * value_dim + column[None, :]
    own = place_of(chunks, sequence, tl.where(is_real, index, 0), num_chunks, chunk_bytes)
    state = tl.load(own, is_real & (tl.load(starts + sequence) > 0), 0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    kept = tl.load(num_kept + sequence)
    read = tl.load(num_read + sequence)
    of_query = head // num_shared * query_head_stride
    of_key = head // num_shared * key_head_stride
    for number in range(count):
        token = (first + number).to(tl.int64)
        if number >= read:
            key_row = _normalised(tl.load(key + token * key_stride + of_key + row, is_row, 0.0).to(tl.float32))
            values = tl.load(value + token * value_stride + head * value_head_stride + column, is_column, 0.0)
            decay = tl.exp(rate * softplus(tl.load(a + token * a_stride + head).to(tl.float32) + shift))
            state = state * decay
            found = tl.sum(state * key_row[:, None], axis=0)
            strength = _sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
            change = (values.to(tl.float32) - found) * strength
            state = state + key_row[:, None] * change[None, :]
        query_row = _normalised(tl.load(query + token * query_stride + of_query + row, is_row, 0.0).to(tl.float32))
        result = tl.sum(state * (query_row * scale)[:, None], axis=0)
        place = out + token * out_stride + head * out_head_stride + column
        tl.store(place, result.to(out.dtype.element_ty), is_column)
        if number == kept - 1:
            tl.store(own, state, is_real)


def gated_delta_rule(
    query_THK: Tensor,
    key_THK: Tensor,
    value_TVE: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    out_TVE: Tensor,
) -> None:
    _, num_heads, value_dim = value_TVE.shape
    key_dim = query_THK.shape[2]
    shape = num_heads, key_dim, value_dim
    memory = states_of(places, first_chunk, tables_Sn, starts_S, num_kept_S, bytes_of(*shape))
    launch(
        _gated_delta_rule,
        (len(tables_Sn), num_heads, triton.cdiv(value_dim, _COLUMNS)),
        query_THK,
        key_THK,
        value_TVE,
        a_TV,
        b_TV,
        a_log_V,
        dt_bias_V,
        memory.chunks,
        starts_S,
        query_starts_S1,
        num_kept_S,
        memory.num_read_S,
        out_TVE,
        *query_THK.stride()[:2],
        *key_THK.stride()[:2],
        *value_TVE.stride()[:2],
        a_TV.stride(0),
        b_TV.stride(0),
        *out_TVE.stride()[:2],
        num_heads // query_THK.shape[1],
        key_dim,
        value_dim,
        key_dim**-0.5,
        memory.num_chunks,
        memory.chunk_bytes,
        key_block=block_of(key_dim),
        columns=_COLUMNS,
    )


def _example() -> object:
    """Qwen3-Next: 16 heads of keys, 32 of values."""
    key = floats(512, 16, 128)
    value = floats(512, 32, 128)
    gate = floats(512, 32)
    per_head = floats(32, dtype=torch.float32)
    places = [raw(320, 65536)]
    starts = given(range(0, 513, 64), torch.int32)
    states = places, 0, given(range(320)).view(8, 40), given([0] * 8), starts, given([64] * 8)
    gated_delta_rule(key, key, value, gate, gate, per_head, per_head, *states, torch.empty_like(value))
    return places


EXAMPLES = (Example("Qwen3-Next", _example),)

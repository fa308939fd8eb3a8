"""The recurrence of Mamba 2, token by token: see the reference for the formulas.

A program has some rows of the matrix of one head and sequence, in registers from the first token to the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.sequence_states import bytes_of
from quire.worker.kernels.triton.example_inputs import floats, given, raw
from quire.worker.kernels.triton.gated_delta_rule import softplus
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of
from quire.worker.kernels.triton.state_memory import place_of, states_of

_ROWS = 32


@triton.jit(do_not_specialize=["starts", "num_kept"])
def _ssd_scan(
    x, dt, dt_bias, a_log, b, c, skip, chunks, starts, query_starts, num_kept, num_read, out,
    x_stride, x_head_stride, dt_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    out_stride, out_head_stride,
    num_shared, head_dim, state_dim, least_dt, most_dt, num_chunks, chunk_bytes,
    rows: tl.constexpr, state_block: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    column = tl.arange(0, state_block)
    is_row = row < head_dim
    is_column = column < state_dim
    is_real = is_row[:, None] & is_column[None, :]
    index = (head * head_dim + row[:, None]) * state_dim + column[None, :]
    own = place_of(chunks, sequence, tl.where(is_real, index, 0), num_chunks, chunk_bytes)
    state = tl.load(own, is_real & (tl.load(starts + sequence) > 0), 0.0)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    share = tl.load(skip + head).to(tl.float32)
    group = head // num_shared
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    kept = tl.load(num_kept + sequence)
    read = tl.load(num_read + sequence)
    for number in range(count):
        token = (first + number).to(tl.int64)
        inputs = tl.load(x + token * x_stride + head * x_head_stride + row, is_row, 0.0).to(tl.float32)
        if number >= read:
            step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + shift)
            step = tl.minimum(tl.maximum(step, least_dt), most_dt)
            turned = tl.load(b + token * b_stride + group * b_group_stride + column, is_column, 0.0).to(tl.float32)
            state = state * tl.exp(-step * rate)
            state = state + (step * inputs)[:, None] * turned[None, :]
        asked = tl.load(c + token * c_stride + group * c_group_stride + column, is_column, 0.0).to(tl.float32)
        result = tl.sum(state * asked[None, :], axis=1) + share * inputs
        place = out + token * out_stride + head * out_head_stride + row
        tl.store(place, result.to(out.dtype.element_ty), is_row)
        if number == kept - 1:
            tl.store(own, state, is_real)


def ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    dt_bias_H: Tensor,
    a_log_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    out_THP: Tensor,
    least_dt: float,
    most_dt: float,
) -> None:
    _, num_heads, head_dim = x_THP.shape
    state_dim = b_TGN.shape[2]
    memory = states_of(places, first_chunk, tables_Sn, starts_S, num_kept_S, bytes_of(num_heads, head_dim, state_dim))
    launch(
        _ssd_scan,
        (len(tables_Sn), num_heads, triton.cdiv(head_dim, _ROWS)),
        x_THP,
        dt_TH,
        dt_bias_H,
        a_log_H,
        b_TGN,
        c_TGN,
        d_H,
        memory.chunks,
        starts_S,
        query_starts_S1,
        num_kept_S,
        memory.num_read_S,
        out_THP,
        *x_THP.stride()[:2],
        dt_TH.stride(0),
        *b_TGN.stride()[:2],
        *c_TGN.stride()[:2],
        *out_THP.stride()[:2],
        num_heads // b_TGN.shape[1],
        head_dim,
        state_dim,
        least_dt,
        most_dt,
        memory.num_chunks,
        memory.chunk_bytes,
        rows=_ROWS,
        state_block=block_of(state_dim),
    )


def _example() -> object:
    """Nemotron-H 8B: 128 heads of 64, 8 groups, states of 128."""
    x = floats(512, 128, 64)
    group = floats(512, 8, 128)
    per_head = floats(128, dtype=torch.float32)
    places = [raw(560, 65536)]
    starts = given(range(0, 513, 64), torch.int32)
    states = places, 0, given(range(560)).view(8, 70), given([0] * 8), starts, given([64] * 8)
    dt = floats(512, 128)
    ssd_scan(x, dt, per_head, per_head, group, group, per_head, *states, torch.empty_like(x), 0.0, 1e9)
    return places


EXAMPLES = (Example("Nemotron-H 8B", _example),)

"""The greatest logit of each row. A row is searched in pieces of one size, side by side; the pieces are compared then.

A value and its token are one whole number, as in `reference/order.py`: the greater comes first, of equals the lower id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of

_PIECE = 4096


@triton.jit
def order_of(value):
    """An int32 that is greater where the float32 is; NaN is the greatest."""
    # + 0.0 makes both zeros the same bits
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value == value, bits, 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The way back."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_of(value, token, vocab_size):
    return (order_of(value).to(tl.int64) << 32) | (vocab_size - 1 - token).to(tl.int64)


@triton.jit
def row_of(rows, number, has_rows: tl.constexpr):
    """The row of logits that is meant."""
    if has_rows:
        row = tl.load(rows + number).to(tl.int64)
    else:
        row = number.to(tl.int64)
    return row


@triton.jit
def _best_of_piece(logits, rows, keys, stride, vocab_size, has_rows: tl.constexpr, piece: tl.constexpr):
    row = row_of(rows, tl.program_id(0), has_rows)
    token = tl.program_id(1) * piece + tl.arange(0, piece)
    is_token = token < vocab_size
    value = tl.load(logits + row * stride + token, is_token, 0.0).to(tl.float32)
    key = tl.where(is_token, key_of(value, token, vocab_size), -(1 << 63))
    tl.store(keys + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(key))


@triton.jit
def _best_of_pieces(keys, tokens, values, num_pieces, vocab_size, block: tl.constexpr):
    row = tl.program_id(0)
    number = tl.arange(0, block)
    best = tl.max(tl.load(keys + row * num_pieces + number, number < num_pieces, -(1 << 63)))
    tl.store(tokens + row, vocab_size - 1 - (best & 0xFFFFFFFF))
    tl.store(values + row, value_of((best >> 32).to(tl.int32)))


def best_tokens(logits_NV: Tensor, rows_n: Tensor | None = None) -> tuple[Tensor, Tensor]:
    count = len(logits_NV) if rows_n is None else len(rows_n)
    vocab_size = logits_NV.shape[1]
    num_pieces = triton.cdiv(vocab_size, _PIECE)
    keys = torch.empty((count, num_pieces), dtype=torch.int64, device=logits_NV.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits_NV.device)
    values = torch.empty(count, dtype=torch.float32, device=logits_NV.device)
    launch(
        _best_of_piece,
        (count, num_pieces),
        logits_NV,
        logits_NV if rows_n is None else rows_n,
        keys,
        logits_NV.stride(0),
        vocab_size,
        has_rows=rows_n is not None,
        piece=_PIECE,
    )
    launch(_best_of_pieces, (count,), keys, tokens, values, num_pieces, vocab_size, block=block_of(num_pieces))
    return tokens, values


EXAMPLES = (
    Example(
        "256 rows of 8B",
        lambda: best_tokens(floats(256, 128256), None),
    ),
)

"""Low-rank products that are added to the output of a linear layer, each token with those of its adapter.

Tokens are sorted by slot, so that a tile has the rows of one adapter. One kernel makes the few numbers A x of each row
in float32, another adds B times these to y. Slots lie as `AdapterFormat` says: panels of 16 columns, word by word.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.reference.adapter_format import AdapterFormat
from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of
from quire.worker.kernels.triton.sort_pairs import most_tiles, sort_pairs, tile_of_bin

_BLOCK_T = 16
_BLOCK_N = 64
_BLOCK_K = 64
# columns of A that are made at once
_BLOCK_G = 16


@triton.jit
def _padded_rank(rank, word: tl.constexpr):
    """As in `AdapterFormat`."""
    words = (rank + word - 1) // word
    return tl.where(words < 16, words, (words + 15) // 16 * 16) * word


@triton.jit
def _place(column, value, num_values, word: tl.constexpr):
    """Where a value of a column lies in panels."""
    panel = column // 16 * (num_values // word) + value // word
    return (panel * 16 + column % 16) * word + value % word


@triton.jit
def _shrink(
    x, ranks, a, low, order, starts,
    x_stride, slot_stride, num_slots, num_inputs, padded_inputs, num_parts, most_low,
    word: tl.constexpr, bins_block: tl.constexpr, block_t: tl.constexpr, block_g: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    slot, first, count = tile_of_bin(starts, tl.program_id(0), num_slots, bins_block, block_t)
    if slot < num_slots and count > 0:
        num_low = num_parts * _padded_rank(tl.load(ranks + slot), word)
        column = tl.program_id(1) * block_g + tl.arange(0, block_g)
        if tl.program_id(1) * block_g < num_low:
            index = tl.arange(0, block_t)
            is_row = index < count
            token = tl.load(order + first + index, is_row, 0).to(tl.int64)
            own = a + slot.to(tl.int64) * slot_stride
            is_column = column < num_low
            total = tl.zeros([block_g, block_t], tl.float32)
            for start in range(0, num_inputs, block_k):
                value = start + tl.arange(0, block_k)
                is_value = value < num_inputs
                place = _place(column[:, None], value[None, :], padded_inputs, word)
                thin = tl.load(own + place, is_column[:, None] & is_value[None, :], 0.0)
                inputs = tl.load(
                    x + token[None, :] * x_stride + value[:, None], is_value[:, None] & is_row[None, :], 0.0
                )
                total = tl.dot(thin, inputs, total, input_precision="ieee")
            is_real = is_column[:, None] & is_row[None, :]
            tl.store(low + token[None, :] * most_low + column[:, None], total, is_real)


@triton.jit
def _expand(
    y, ranks, b, low, parts, order, starts,
    y_stride, slot_stride, num_slots, num_parts, most_low,
    word: tl.constexpr, parts_block: tl.constexpr, bins_block: tl.constexpr,
    block_t: tl.constexpr, block_n: tl.constexpr, block_g: tl.constexpr,
):  # fmt: skip
    slot, first, count = tile_of_bin(starts, tl.program_id(0), num_slots, bins_block, block_t)
    # a tile has the outputs of one part
    part = tl.arange(0, parts_block)
    size = tl.load(parts + part, part < num_parts, 0)
    num_tiles = (size + block_n - 1) // block_n
    behind = tl.cumsum(num_tiles)
    number = tl.sum((behind <= tl.program_id(1)).to(tl.int32))
    rank = 0
    if slot < num_slots and count > 0:
        rank = tl.load(ranks + slot)
    if rank > 0 and number < num_parts:
        is_own = part == number
        within = tl.program_id(1) - tl.sum(tl.where(is_own, behind - num_tiles, 0))
        output = within * block_n + tl.arange(0, block_n)
        is_output = output < tl.sum(tl.where(is_own, size, 0))
        first_output = tl.sum(tl.where(part < number, size, 0))
        # in a slot each part begins with a panel of its own
        first_column = tl.sum(tl.where(part < number, (size + 15) // 16 * 16, 0))
        index = tl.arange(0, block_t)
        is_row = index < count
        token = tl.load(order + first + index, is_row, 0).to(tl.int64)
        own = b + slot.to(tl.int64) * slot_stride
        padded = _padded_rank(rank, word)
        total = tl.zeros([block_n, block_t], tl.float32)
        for start in range(0, rank, block_g):
            value = start + tl.arange(0, block_g)
            is_value = value < rank
            place = _place((first_column + output)[:, None], value[None, :], padded, word)
            thin = tl.load(own + place, is_output[:, None] & is_value[None, :], 0.0)
            numbers = tl.load(
                low + token[None, :] * most_low + number * padded + value[:, None],
                is_value[:, None] & is_row[None, :],
                0.0,
            )
            # two numbers of the type of the weights are as good as one of float32
            upper = numbers.to(thin.dtype)
            total = tl.dot(thin, upper, total, input_precision="ieee")
            if thin.dtype != tl.float32:
                rest = (numbers - upper.to(tl.float32)).to(thin.dtype)
                total = tl.dot(thin, rest, total, input_precision="ieee")
        place = token[None, :] * y_stride + (first_output + output)[:, None]
        is_real = is_output[:, None] & is_row[None, :]
        before = tl.load(y + place, is_real, 0.0).to(tl.float32)
        tl.store(y + place, (before + total).to(y.dtype.element_ty), is_real)


def add_adapters(
    y_TN: Tensor,
    x_TC: Tensor,
    slots_T: Tensor,
    ranks_L: Tensor,
    a_LE: Tensor,
    b_LE: Tensor,
    parts_P: list[int],
    most_rank: int,
) -> None:
    num_tokens, num_inputs = x_TC.shape
    if num_tokens == 0:
        return
    form = AdapterFormat(num_inputs, tuple(parts_P), x_TC.dtype)
    word = 2 if x_TC.dtype == torch.bfloat16 else 1
    num_slots, num_parts = len(ranks_L), len(parts_P)
    most_low = num_parts * form.padded_rank(most_rank)
    pairs = sort_pairs(slots_T, 0, num_slots)
    num_tiles = most_tiles(num_tokens, num_slots, _BLOCK_T)
    low = torch.empty((num_tokens, most_low), dtype=torch.float32, device=x_TC.device)
    blocks: dict[str, Any] = {"word": word, "bins_block": block_of(num_slots + 1), "block_t": _BLOCK_T}
    launch(
        _shrink,
        (num_tiles, triton.cdiv(most_low, _BLOCK_G)),
        x_TC,
        ranks_L,
        a_LE,
        low,
        pairs.order,
        pairs.starts,
        x_TC.stride(0),
        a_LE.stride(0),
        num_slots,
        num_inputs,
        form.padded_inputs,
        num_parts,
        most_low,
        **blocks,
        block_g=_BLOCK_G,
        block_k=_BLOCK_K,
    )
    launch(
        _expand,
        (num_tiles, sum(triton.cdiv(part, _BLOCK_N) for part in parts_P)),
        y_TN,
        ranks_L,
        b_LE,
        low,
        _sizes(tuple(parts_P), ranks_L),
        pairs.order,
        pairs.starts,
        y_TN.stride(0),
        b_LE.stride(0),
        num_slots,
        num_parts,
        most_low,
        **blocks,
        parts_block=block_of(num_parts),
        block_n=_BLOCK_N,
        block_g=_BLOCK_G,
    )


_sizes_of_parts: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _sizes(parts: tuple[int, ...], like: Tensor) -> Tensor:
    """On the device; kept, because a copy waits for it."""
    key = parts, like.device
    if key not in _sizes_of_parts:
        _sizes_of_parts[key] = torch.tensor(parts, dtype=torch.int32, device=like.device)
    return _sizes_of_parts[key]


def _example(num_tokens: int) -> None:
    """Query, key and value of 8B with adapters of rank 16."""
    parts = (4096, 1024, 1024)
    x = floats(num_tokens, 4096)
    size_of_a, size_of_b = AdapterFormat(4096, parts, x.dtype).sizes(16)
    slots = given((token % 8 for token in range(num_tokens)), torch.int32)
    ranks = given([16] * 8, torch.int32)
    add_adapters(
        floats(num_tokens, 6144),
        x,
        slots,
        ranks,
        floats(8, size_of_a),
        floats(8, size_of_b),
        list(parts),
        16,
    )


EXAMPLES = (
    Example("one token of 8B", lambda: _example(1), operations=2 * 48 * (4096 + 2048)),
    Example("a prompt of 8B", lambda: _example(2048), operations=2 * 2048 * 48 * (4096 + 2048)),
)

"""One product an expert: rows of tokens with the packed weights of the experts that they are sent to.

Pairs of a token and an expert are sorted by expert on the device, and a tile has the rows of one expert. Where weights
lie stands in a table of addresses. Without numbers of experts row k of a token goes to weight k.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.reference.packed_format import FP4, PackedHeader
from quire.worker.kernels.triton.example_inputs import floats, given, raw
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of
from quire.worker.kernels.triton.sort_pairs import SortedPairs, add_counts, most_tiles, sort_pairs, tile_of_bin
from quire.worker.kernels.triton.tile_product import (
    BLOCK_N,
    TRITON_TYPES,
    Inputs,
    constants_of,
    inputs_of,
    rows_at_once,
    span_of_product,
)
from quire.worker.kernels.triton.weight_layout import TILES_LAYOUT, WeightForm, form_of

_ADDRESSES = "quire_addresses"
# of a grid, but for the first one
_LONGEST_AXIS = 65_535


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_linear(
    addresses, x, x_scales, bias_addresses, out, order, starts,
    num_tokens, num_experts, inner, stride, inner_stride, scale_stride,
    num_rows, num_columns, pitch, num_groups, group, first_scale,
    kind: tl.constexpr, value_type: tl.constexpr, dot_type: tl.constexpr, step: tl.constexpr, zero: tl.constexpr,
    has_offsets: tl.constexpr, has_shift: tl.constexpr, is_odd: tl.constexpr, is_rounded: tl.constexpr,
    is_scaled_last: tl.constexpr, scale_type: tl.constexpr,
    span: tl.constexpr, block_n: tl.constexpr, block_t: tl.constexpr,
    bias_type: tl.constexpr, has_order: tl.constexpr, bins_block: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    index = tl.arange(0, block_t)
    if has_order:
        expert, first_pair, count = tile_of_bin(starts, tile, num_experts, bins_block, block_t)
        is_row = index < count
        # rows that are not there are computed like the first of all, and not stored
        pair = tl.load(order + first_pair + index, is_row, 0).to(tl.int64)
    else:
        expert = tile % num_experts
        token = tile // num_experts * block_t + index
        is_row = token < num_tokens
        pair = tl.minimum(token, num_tokens - 1).to(tl.int64) * num_experts + expert
    is_real = (output < num_rows)[:, None] & is_row[None, :]
    place = pair[None, :] * num_rows + output[:, None]
    x_place = pair // inner * stride + pair % inner * inner_stride
    scale_place = pair // inner * scale_stride
    total = tl.zeros([block_n, block_t], tl.float32)
    # whose expert is elsewhere gets zeros
    if expert < num_experts:
        packed = tl.load(addresses + expert).to(tl.pointer_type(tl.uint8))
        packed = tl.multiple_of(packed, 16)
        for first in range(0, num_columns, span):
            total += span_of_product(
                packed, x, x_scales, x_place, scale_place, output, first,
                num_rows, num_columns, pitch, num_groups, group, first_scale,
                kind, value_type, dot_type, step, zero, has_offsets, has_shift, is_odd, is_rounded, is_scaled_last,
                scale_type, span, block_n, block_t,
            )  # fmt: skip
        if bias_type is not None:
            bias = tl.load(bias_addresses + expert).to(tl.pointer_type(bias_type))
            total += tl.load(bias + output, output < num_rows, 0.0).to(tl.float32)[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), is_real)


def grouped_linear(
    x: Tensor,
    ids_TK: Tensor | None,
    packed: list[Tensor],
    biases: list[Tensor],
    num_rows: int,
    counts_X: Tensor | None,
    first: int = 0,
) -> Tensor:
    form = form_of(packed[0])
    assert form.header.num_rows == num_rows
    bias_addresses = addresses_of(biases, is_alike=_is_alike_bias) if biases else None
    bias_type = TRITON_TYPES[biases[0].dtype] if biases else None
    addresses = addresses_of(packed, is_alike=_is_alike_weight)
    if ids_TK is not None and counts_X is not None:
        add_counts(ids_TK.contiguous(), counts_X)
    if ids_TK is None and counts_X is not None:
        counts_X += x.shape[0]
    return multiply_grouped(x, ids_TK, addresses, form, bias_addresses, bias_type, first)


def multiply_grouped(
    x: Tensor,
    ids_TK: Tensor | None,
    addresses: Tensor,
    form: WeightForm,
    bias_addresses: Tensor | None,
    bias_type: Any,
    first: int,
) -> Tensor:
    """With weights that lie at these addresses."""
    header = form.header
    num_experts = len(addresses)
    num_tokens, top_k = (x.shape[0], num_experts) if ids_TK is None else ids_TK.shape
    out = x.new_empty((num_tokens, top_k, header.num_rows))
    count = num_tokens * top_k
    if count == 0:
        return out
    inputs = inputs_of(x, form, top_k if x.ndim == 2 else None)
    block_t = rows_at_once(num_tokens if ids_TK is None else -(-count // num_experts))
    if ids_TK is None:
        pairs = None
        num_tiles = triton.cdiv(num_tokens, block_t) * num_experts
    else:
        pairs = sort_pairs(ids_TK.contiguous(), first, num_experts)
        num_tiles = most_tiles(count, num_experts, block_t)
    along_axis = min(num_tiles, _LONGEST_AXIS)
    launch(
        _grouped_linear,
        (triton.cdiv(header.num_rows, BLOCK_N), along_axis, triton.cdiv(num_tiles, along_axis)),
        *_arguments(addresses, inputs, bias_addresses, out, pairs, num_tokens, form),
        **constants_of(form, x, block_t),
        bias_type=bias_type,
        has_order=pairs is not None,
        bins_block=block_of(num_experts + 1),
        num_stages=3,
    )
    return out


def _arguments(
    addresses: Tensor,
    inputs: Inputs,
    bias_addresses: Tensor | None,
    out: Tensor,
    pairs: SortedPairs | None,
    num_tokens: int,
    form: WeightForm,
) -> tuple[Any, ...]:
    header = form.header
    return (
        addresses,
        inputs.tensor,
        inputs.scales,
        addresses if bias_addresses is None else bias_addresses,
        out,
        addresses if pairs is None else pairs.order,
        addresses if pairs is None else pairs.starts,
        num_tokens,
        len(addresses),
        inputs.inner,
        inputs.stride,
        inputs.inner_stride,
        inputs.scale_stride,
        header.num_rows,
        header.num_columns,
        form.pitch,
        header.num_groups,
        form.group,
        form.first_scale,
    )


def addresses_of(tensors: list[Tensor], is_alike: Any) -> Tensor:
    """Where they lie, as numbers on their device. The first of them remembers, because a copy waits for the device."""
    places = [tensor.data_ptr() for tensor in tensors]
    remembered: dict[int, tuple[list[int], Tensor]] = getattr(tensors[0], _ADDRESSES, {})
    known = remembered.get(len(places))
    if known is None or known[0] != places:
        if not all(is_alike(tensor, tensors[0]) for tensor in tensors):
            raise RuntimeError("experts of one layer must be packed alike, and have biases of one kind")
        known = (places, torch.tensor(places, dtype=torch.int64, device=tensors[0].device))
        setattr(tensors[0], _ADDRESSES, remembered | {len(places): known})
    return known[1]


def _is_alike_weight(packed: Tensor, other: Tensor) -> bool:
    return form_of(packed) == form_of(other)


def _is_alike_bias(bias: Tensor, other: Tensor) -> bool:
    return bias.dtype == other.dtype and bias.shape == other.shape and bias.is_contiguous()


def _example(num_tokens: int, format_: Any, group: int) -> object:
    """The first products of Qwen3-30B-A3B, and those of gpt-oss in 4-bit floats."""
    header = PackedHeader(
        format_, 1536, 2048, group, is_weight_only=True, layout=TILES_LAYOUT, has_half_scales=group > 0
    )
    form = WeightForm(header)
    packed = raw(128, form.first_scale + form.num_scale_bytes)
    addresses = given(weight.data_ptr() for weight in packed)
    ids = given((pair % 128 for pair in range(num_tokens * 8)), torch.int32).view(num_tokens, 8)
    return multiply_grouped(floats(num_tokens, 2048), ids, addresses, form, None, None, 0), packed


EXAMPLES = (
    Example("bfloat16, 16 tokens", lambda: _example(16, torch.bfloat16, 0), operations=2 * 128 * 1536 * 2048),
    Example("bfloat16, 2048 tokens", lambda: _example(2048, torch.bfloat16, 0), operations=2 * 16384 * 1536 * 2048),
    Example("fp4, 2048 tokens", lambda: _example(2048, FP4, 32), operations=2 * 16384 * 1536 * 2048),
)

"""Linear layers whose weight is packed: floats in a fixed order, and 8- and 4-bit codes. See `tile_product.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.reference.look_up import rows_here
from quire.worker.kernels.reference.packed_format import FP4, PackedHeader
from quire.worker.kernels.triton.example_inputs import floats, raw
from quire.worker.kernels.triton.launch import Example, launch, target
from quire.worker.kernels.triton.tile_product import (
    BLOCK_N,
    SPAN,
    constants_of,
    inputs_of,
    rows_at_once,
    span_of_product,
)
from quire.worker.kernels.triton.weight_layout import (
    TILES_LAYOUT,
    WeightForm,
    form_of,
    pack_quantized,
    pack_weight,
    rows_of_weight,
    unpack_weight,
)

__all__ = ["pack_quantized", "pack_weight", "packed_linear", "packed_rows", "unpack_weight"]

# Up to so many rows spans are computed side by side: there are too few tiles to keep a GPU busy.
_FEW_ROWS = 64


@triton.jit(do_not_specialize=["num_inputs"])
def _packed_linear(
    packed, x, x_scales, bias, out,
    num_inputs, inner, stride, inner_stride, scale_stride,
    num_rows, num_columns, pitch, num_groups, group, first_scale,
    kind: tl.constexpr, value_type: tl.constexpr, dot_type: tl.constexpr, step: tl.constexpr, zero: tl.constexpr,
    has_offsets: tl.constexpr, has_shift: tl.constexpr, is_odd: tl.constexpr, is_rounded: tl.constexpr,
    is_scaled_last: tl.constexpr, scale_type: tl.constexpr,
    span: tl.constexpr, block_n: tl.constexpr, block_t: tl.constexpr,
    has_bias: tl.constexpr, is_side_by_side: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row = tl.program_id(1) * block_t + tl.arange(0, block_t)
    # rows beyond the last are computed like it, and not stored: a mask would take registers in every step
    read = tl.minimum(row, num_inputs - 1).to(tl.int64)
    x_place = read // inner * stride + read % inner * inner_stride
    scale_place = read // inner * scale_stride
    if is_side_by_side:
        first = tl.program_id(2) * span
        total = span_of_product(
            packed, x, x_scales, x_place, scale_place, output, first,
            num_rows, num_columns, pitch, num_groups, group, first_scale,
            kind, value_type, dot_type, step, zero, has_offsets, has_shift, is_odd, is_rounded, is_scaled_last,
            scale_type, span, block_n, block_t,
        )  # fmt: skip
        out += tl.program_id(2).to(tl.int64) * num_inputs * num_rows
    else:
        total = tl.zeros([block_n, block_t], tl.float32)
        for first in range(0, num_columns, span):
            total += span_of_product(
                packed, x, x_scales, x_place, scale_place, output, first,
                num_rows, num_columns, pitch, num_groups, group, first_scale,
                kind, value_type, dot_type, step, zero, has_offsets, has_shift, is_odd, is_rounded, is_scaled_last,
                scale_type, span, block_n, block_t,
            )  # fmt: skip
        if has_bias:
            total += tl.load(bias + output, output < num_rows, 0.0).to(tl.float32)[:, None]
    is_real = (output < num_rows)[:, None] & (row < num_inputs)[None, :]
    place = row.to(tl.int64)[None, :] * num_rows + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), is_real)


@triton.jit(do_not_specialize=["size"])
def _add_spans(spans, bias, out, num_rows, size, num_spans, has_bias: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_real = place < size
    total = tl.zeros([block], tl.float32)
    for number in range(num_spans):
        total += tl.load(spans + number * size + place, is_real, 0.0)
    if has_bias:
        total += tl.load(bias + place % num_rows, is_real, 0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), is_real)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    form = form_of(packed)
    assert form.header.num_rows == num_rows
    return multiply(x, packed, form, bias)


def multiply(x: Tensor, packed: Tensor, form: WeightForm, bias: Tensor | None) -> Tensor:
    """x W^T + bias of a weight whose form is known."""
    header = form.header
    out = x.new_empty((*x.shape[:-1], header.num_rows))
    count = out.numel() // header.num_rows
    if count == 0:
        return out
    inputs = inputs_of(x, form)
    num_spans = triton.cdiv(header.num_columns, SPAN)
    is_side_by_side = num_spans > 1 and count <= _FEW_ROWS
    block_t = rows_at_once(count)
    sums = x.new_empty((num_spans, count, header.num_rows), dtype=torch.float32) if is_side_by_side else out
    has_bias = bias is not None
    some_bias = out if bias is None else bias.contiguous()
    launch(
        _packed_linear,
        (triton.cdiv(header.num_rows, BLOCK_N), triton.cdiv(count, block_t), num_spans if is_side_by_side else 1),
        packed,
        inputs.tensor,
        inputs.scales,
        some_bias,
        sums,
        count,
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
        **constants_of(form, x, block_t),
        has_bias=has_bias,
        is_side_by_side=is_side_by_side,
        # sums that come out of the memory of a large Blackwell's tensor cores are too many for the threads of four
        num_warps=8 if target().arch in (100, 103) else 4,
        num_stages=3,
    )
    if is_side_by_side:
        block = 1024
        launch(
            _add_spans,
            (triton.cdiv(out.numel(), block),),
            sums,
            some_bias,
            out,
            header.num_rows,
            out.numel(),
            num_spans,
            has_bias=has_bias,
            block=block,
        )
    return out


def packed_rows(
    packed: Tensor, ids_T: Tensor, dtype: torch.dtype, num_columns: int, first: int | None = None
) -> Tensor:
    """Rows of an embedding; few, so plain PyTorch makes them."""
    form = form_of(packed)
    assert form.header.num_columns == num_columns
    if first is None:
        return rows_of_weight(packed, ids_T).to(dtype)
    return rows_here(ids_T - first, form.header.num_rows, lambda ids: rows_of_weight(packed, ids).to(dtype))


def _example(num_tokens: int, format_: Any, group: int = 0, *, is_weight_only: bool = True) -> object:
    header = PackedHeader(
        format_, 4096, 4096, group, 0, is_weight_only=is_weight_only, layout=TILES_LAYOUT, has_half_scales=group > 0
    )
    form = WeightForm(header)
    packed = raw(form.first_scale + form.num_scale_bytes)
    return multiply(floats(num_tokens, 4096), packed, form, None)


_FORMS: dict[str, tuple[Any, int, bool]] = {
    "bfloat16": (torch.bfloat16, 0, True),
    "int8": (8, 0, False),
    "int8 weight-only": (8, 0, True),
    "int4": (4, 32, False),
    "int4 weight-only": (4, 128, True),
    "fp4 weight-only": (FP4, 32, True),
}
EXAMPLES = tuple(
    Example(
        f"{name}, {num_tokens} tokens",
        partial(_example, num_tokens, format_, group, is_weight_only=is_weight_only),
        operations=2 * num_tokens * 4096 * 4096,
    )
    for name, (format_, group, is_weight_only) in _FORMS.items()
    for num_tokens in (1, 2048)
)

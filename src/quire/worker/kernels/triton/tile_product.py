"""A tile of a product: some outputs of a packed weight times some rows of inputs, in float32.

The weight stands on the left, so that its codes go from registers into the tensor cores, and rows of inputs are the
columns of the product: however many there are, an output is the same chain of operations.

    spans of SPAN inputs           each is one sum of float32; sums of spans are added in their order
      steps of a group or less     codes are multiplied as they are; their scale goes onto the sum of the step

With few rows spans are computed side by side and added up by a second kernel; the bits are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.reference.packed_linear import QUANTIZED_TOGETHER
from quire.worker.kernels.triton.launch import launch, target
from quire.worker.kernels.triton.rows import rows_of
from quire.worker.kernels.triton.weight_layout import WeightForm, step_of

# Inputs that are summed up before others are added. A multiple of all steps.
SPAN = 1024
HEADER = tl.constexpr(64)
# Inputs of a token that share a scale where they are rounded.
TOGETHER = tl.constexpr(128)
# What has no step of its own is made floats of, so many inputs at once.
_ODD_STEP = 32
# Outputs of a tile, and most rows of inputs: what the matrix units of all GPUs take.
BLOCK_N = 64
MOST_ROWS = 64
TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def codes_of(stored, kind: tl.constexpr, zero: tl.constexpr):
    """Whole numbers of the 4 lower bits."""
    code = (stored & 15).to(tl.int32) + zero
    if kind == "fp4":
        magnitude = code & 7
        exponent = magnitude >> 1
        bit = magnitude & 1
        doubled = tl.where(exponent == 0, bit, (2 + bit) << tl.maximum(exponent - 1, 0))
        code = tl.where(code >= 8, -doubled, doubled)
    return code


@triton.jit
def multiply_codes(codes, inputs, dot_type: tl.constexpr):
    """Their product in float32. Whole numbers are exact in every type that `dot_type` is."""
    if dot_type == tl.int8:
        product = tl.dot(codes.to(tl.int8), inputs).to(tl.float32)
    else:
        product = tl.dot(codes.to(tl.float32).to(dot_type), inputs.to(tl.float32).to(dot_type), input_precision="ieee")
    return product


@triton.jit
def span_of_product(
    packed, x, x_scales, x_place, scale_place, output, first,
    num_rows, num_columns, pitch, num_groups, group, first_scale,
    kind: tl.constexpr, value_type: tl.constexpr, dot_type: tl.constexpr, step: tl.constexpr, zero: tl.constexpr,
    has_offsets: tl.constexpr, has_shift: tl.constexpr, is_odd: tl.constexpr, is_rounded: tl.constexpr,
    is_scaled_last: tl.constexpr, scale_type: tl.constexpr,
    span: tl.constexpr, block_n: tl.constexpr, block_t: tl.constexpr,
):  # fmt: skip
    """[block_n, block_t]: the sums over inputs `first` to `first + span`. `x_place`, `scale_place`: where rows begin,
    all of which may be read."""
    # outputs beyond the last are computed like it, and not stored
    row = tl.minimum(output, num_rows - 1).to(tl.int64)
    scales = (packed + first_scale).to(tl.pointer_type(scale_type)) + row
    offsets = scales + num_groups * num_rows
    total = tl.zeros([block_n, block_t], tl.float32)
    for start in range(first, tl.minimum(first + span, num_columns), step):
        if kind == "float":
            values = (packed + HEADER).to(tl.pointer_type(value_type))
            column = start + tl.arange(0, step)
            weight = tl.load(values + (row * pitch)[:, None] + column[None, :]).to(dot_type)
            is_input = (column < num_columns)[:, None]
            inputs = tl.load(x + x_place[None, :] + column[:, None], is_input, 0.0).to(dot_type)
            total = tl.dot(weight, inputs, total, input_precision="ieee")
        elif is_odd:
            column = start + tl.arange(0, step)
            if kind == "int8":
                code = tl.load(
                    (packed + HEADER).to(tl.pointer_type(tl.int8)) + (row * pitch)[:, None] + column[None, :]
                )
                code = code.to(tl.int32) + zero
            else:
                byte = column // 32 * 16 + column % 16
                stored = tl.load(packed + HEADER + (row * (pitch // 2))[:, None] + byte[None, :]).to(tl.int32)
                code = codes_of(stored >> (column % 32 // 16 * 4)[None, :], kind, zero)
            number = tl.minimum(column, num_columns - 1) // group
            scale_at = number[None, :] * num_rows
            weight = code.to(tl.float32) * tl.load(scales[:, None] + scale_at).to(tl.float32)
            if has_offsets:
                weight += tl.load(offsets[:, None] + scale_at)
            is_input = (column < num_columns)[:, None]
            inputs = tl.load(x + x_place[None, :] + column[:, None], is_input, 0.0).to(tl.float32)
            if is_rounded:
                at = scale_place[None, :] + (tl.minimum(column, num_columns - 1) // TOGETHER)[:, None]
                inputs *= tl.load(x_scales + at)
            total = tl.dot(weight, inputs, total, input_precision="ieee")
        else:
            if kind == "int8":
                column = start + tl.arange(0, step)
                code = tl.load(
                    (packed + HEADER).to(tl.pointer_type(tl.int8)) + (row * pitch)[:, None] + column[None, :]
                )
                is_input = (column < num_columns)[:, None]
                inputs = tl.load(x + x_place[None, :] + column[:, None], is_input, 0.0)
                part = multiply_codes(code, inputs, dot_type)
                if has_shift:
                    input_sum = tl.sum(inputs.to(tl.float32), axis=0)
            else:
                # the lower halves of bytes belong to the first 16 of 32 inputs, the upper ones to the others
                index = tl.arange(0, step // 2)
                lower = start + index // 16 * 32 + index % 16
                stored = tl.load(packed + HEADER + (row * (pitch // 2))[:, None] + (start // 2 + index)[None, :])
                is_lower = (lower < num_columns)[:, None]
                is_upper = (lower + 16 < num_columns)[:, None]
                place = x_place[None, :] + lower[:, None]
                inputs_below = tl.load(x + place, is_lower, 0.0)
                inputs_above = tl.load(x + place + 16, is_upper, 0.0)
                part = multiply_codes(codes_of(stored, kind, zero), inputs_below, dot_type)
                part += multiply_codes(codes_of(stored >> 4, kind, zero), inputs_above, dot_type)
                if has_shift:
                    input_sum = tl.sum(inputs_below.to(tl.float32), axis=0)
                    input_sum += tl.sum(inputs_above.to(tl.float32), axis=0)
            if is_rounded:
                x_scale = tl.load(x_scales + scale_place + start // TOGETHER)
                part *= x_scale[None, :]
                if has_shift:
                    input_sum *= x_scale
            scale_at = start // group * num_rows
            if not is_scaled_last:
                scale = tl.load(scales + scale_at).to(tl.float32)
                part *= scale[:, None]
                if has_shift:
                    # to codes of 8 bits a zero point is added here: with it they might not fit into their type
                    shift = scale * zero if kind == "int8" else tl.zeros_like(scale)
                    if has_offsets:
                        shift += tl.load(offsets + scale_at)
                    part += shift[:, None] * input_sum[None, :]
            total += part
    if is_scaled_last:
        total *= tl.load(scales)[:, None]
    return total


@triton.jit
def _round_inputs(
    x, codes, scales,
    inner, stride, inner_stride, num_columns, pitch,
    together: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * together + tl.arange(0, together)
    place = row // inner * stride + row % inner * inner_stride
    number = tl.load(x + place + column, column < num_columns, 0.0).to(tl.float32)
    largest = tl.max(tl.abs(number))
    # in the order of the specification: ties would come out differently
    inverse = tl.where(largest > 1e-30, tl.math.div_rn(127.0, tl.maximum(largest, 1e-30)), 0.0)
    # to the nearest, ties to even: beyond 2 to the power 23 there are no fractions
    unit = 12582912.0
    code = (number * inverse + unit) - unit
    tl.store(codes + row * pitch + column, code.to(tl.int8))
    tl.store(scales + row * (pitch // together) + tl.program_id(1), tl.math.div_rn(largest, 127.0))


class Inputs(NamedTuple):
    """Rows of inputs as a tile reads them: row r is r // inner * stride + r % inner * inner_stride behind the start."""

    tensor: Tensor
    inner: int
    stride: int
    inner_stride: int
    scales: Tensor
    scale_stride: int


def inputs_of(x: Tensor, form: WeightForm, num_readers: int | None = None) -> Inputs:
    """Rows of x, rounded if the weight asks for it. `num_readers`: so many outputs one after the other read one row."""
    rows = rows_of(x)
    scales = rows.tensor
    if form.is_rounded:
        num_pieces = form.pitch // QUANTIZED_TOGETHER
        codes = torch.empty((rows.count, form.pitch), dtype=torch.int8, device=x.device)
        scales = torch.empty((rows.count, num_pieces), dtype=torch.float32, device=x.device)
        launch(
            _round_inputs,
            (rows.count, num_pieces),
            rows.tensor,
            codes,
            scales,
            rows.inner,
            rows.stride,
            rows.inner_stride,
            x.shape[-1],
            form.pitch,
            together=QUANTIZED_TOGETHER,
        )
        rows = rows_of(codes)
    scale_stride = scales.stride(0) if form.is_rounded else 0
    if num_readers is None:
        return Inputs(rows.tensor, rows.inner, rows.stride, rows.inner_stride, scales, scale_stride)
    return Inputs(rows.tensor, num_readers, rows.stride, 0, scales, scale_stride)


def constants_of(form: WeightForm, inputs: Tensor, block_t: int) -> dict[str, Any]:
    """What a kernel is compiled for."""
    header = form.header
    step = step_of(form)
    is_odd = step == 0
    has_shift = header.has_offsets or (form.kind == "int8" and form.zero != 0)
    return {
        "kind": form.kind,
        "value_type": TRITON_TYPES.get(header.format, tl.int8),
        "dot_type": _dot_type(form, inputs, step),
        "step": step or _ODD_STEP,
        "zero": form.zero,
        "has_offsets": header.has_offsets,
        "has_shift": has_shift,
        "is_odd": is_odd,
        "is_rounded": form.is_rounded,
        "scale_type": TRITON_TYPES[form.scale_type],
        "is_scaled_last": header.is_quantized and not is_odd and header.num_groups == 1 and not has_shift,
        "span": SPAN,
        "block_n": BLOCK_N,
        "block_t": block_t,
    }


def _dot_type(form: WeightForm, inputs: Tensor, step: int) -> Any:
    """In which numbers are multiplied."""
    if form.is_rounded:
        # The tensor cores take 32 numbers of 8 bits, and the newest none at all in their large instructions. As floats
        # codes are multiplied as exactly.
        has_integers = target().arch not in (100, 103)
        return tl.int8 if has_integers and (form.kind == "int8" or step > _ODD_STEP) else tl.float16
    if form.kind == "float" and form.header.format != inputs.dtype:
        return tl.float32
    return TRITON_TYPES[inputs.dtype]


def rows_at_once(num_rows: int) -> int:
    """Columns of a tile for so many rows of inputs."""
    return min(max(16, 1 << (num_rows - 1).bit_length()), MOST_ROWS)

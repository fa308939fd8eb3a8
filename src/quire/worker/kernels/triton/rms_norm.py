"""Root mean square normalisation, alone and behind the end of a residual branch. A program is some rows,
as many as make up 2048 numbers: their number depends on their width alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of, rows_of, warps_of


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, residual, weight, out, total,
    num_rows, inner, x_stride, x_inner_stride, residual_inner, residual_stride, residual_inner_stride,
    width, eps,
    has_residual: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block)
    is_column = (column < width)[None]
    is_real = (row < num_rows)[:, None] & is_column
    place = row // inner * x_stride + row % inner * x_inner_stride
    value = tl.load(x + place[:, None] + column[None], is_real, 0.0)
    out_place = row[:, None] * width + column[None]
    if has_residual:
        other_place = row // residual_inner * residual_stride + row % residual_inner * residual_inner_stride
        other = tl.load(residual + other_place[:, None] + column[None], is_real, 0.0)
        # rounded first: it goes on as the residual, and the norm sees the same values
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + out_place, value, is_real)
    number = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(number * number, 1) / width + eps)
    # rounded before the weight, as Transformers does
    rounded = (number * factor[:, None]).to(x.dtype.element_ty).to(tl.float32)
    scaled = rounded * tl.load(weight + column[None], is_column, 0.0).to(tl.float32)
    tl.store(out + out_place, scaled.to(out.dtype.element_ty), is_real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype), memory_format=torch.contiguous_format)
    _launch(x, None, weight, out, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(total, dtype=torch.promote_types(x.dtype, weight.dtype))
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor, eps: float) -> None:
    rows = rows_of(x)
    others = rows if residual is None else rows_of(residual)
    block = block_of(x.shape[-1])
    block_rows = max(1, 2048 // block)
    launch(
        _rms_norm,
        (-(-rows.count // block_rows),),
        rows.tensor,
        others.tensor,
        weight.contiguous(),
        out,
        total,
        rows.count,
        rows.inner,
        rows.stride,
        rows.inner_stride,
        others.inner,
        others.stride,
        others.inner_stride,
        x.shape[-1],
        eps,
        has_residual=residual is not None,
        block_rows=block_rows,
        block=block,
        num_warps=warps_of(block_rows * block),
    )


def _example(num_tokens: int, width: int, is_added: bool) -> object:
    x = floats(num_tokens, width)
    weight = floats(width)
    return add_rms_norm(x, floats(num_tokens, width), weight, 1e-5) if is_added else rms_norm(x, weight, 1e-5)


EXAMPLES = (
    Example("one token of 8B", lambda: _example(1, 4096, is_added=True)),
    Example("a prompt of 8B", lambda: _example(2048, 4096, is_added=True)),
    Example("heads of a prompt of 8B", lambda: _example(2048 * 32, 128, is_added=False)),
)

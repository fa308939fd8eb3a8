"""Mean and variance normalisation. A program is one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of, rows_of, warps_of


@triton.jit
def _layer_norm(
    x, weight, bias, out, inner, stride, inner_stride, width, eps,
    has_weight: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    is_real = column < width
    number = tl.load(x + row // inner * stride + row % inner * inner_stride + column, is_real, 0.0).to(tl.float32)
    distance = tl.where(is_real, number - tl.sum(number) / width, 0.0)
    result = distance * tl.rsqrt(tl.sum(distance * distance) / width + eps)
    if has_weight:
        result *= tl.load(weight + column, is_real, 0.0).to(tl.float32)
    if has_bias:
        result += tl.load(bias + column, is_real, 0.0).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), is_real)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = rows_of(x)
    block = block_of(x.shape[-1])
    launch(
        _layer_norm,
        (rows.count,),
        rows.tensor,
        x if weight is None else weight.contiguous(),
        x if bias is None else bias.contiguous(),
        out,
        rows.inner,
        rows.stride,
        rows.inner_stride,
        x.shape[-1],
        eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
        block=block,
        num_warps=warps_of(block),
    )
    return out


def _example() -> Tensor:
    return layer_norm(floats(2048, 4096), floats(4096), floats(4096), 1e-5)


EXAMPLES = (Example("a prompt", _example),)

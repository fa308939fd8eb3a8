"""Root mean square norm with a gate of SiLU, before or behind it. A program is one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of, rows_of, warps_of


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, inner, stride, inner_stride, gate_inner, gate_stride, gate_inner_stride,
    num_weights, width, eps, gates_first: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    is_real = column < width
    number = tl.load(x + row // inner * stride + row % inner * inner_stride + column, is_real, 0.0).to(tl.float32)
    gate_place = row // gate_inner * gate_stride + row % gate_inner * gate_inner_stride
    opening = tl.load(gate + gate_place + column, is_real, 0.0).to(tl.float32)
    opening = opening / (1.0 + tl.exp(-opening))
    scale = tl.load(weight + row % num_weights * width + column, is_real, 0.0).to(tl.float32)
    if gates_first:
        number *= opening
    normed = number * tl.rsqrt(tl.sum(number * number) / width + eps)
    # rounded where Transformers does
    result = normed.to(x.dtype.element_ty).to(tl.float32) * scale
    if not gates_first:
        result = result.to(x.dtype.element_ty).to(tl.float32) * opening
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), is_real)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    rows, gates = rows_of(x), rows_of(gate)
    block = block_of(width)
    launch(
        _gated_rms_norm,
        (rows.count,),
        rows.tensor,
        gates.tensor,
        weight.contiguous(),
        out,
        rows.inner,
        rows.stride,
        rows.inner_stride,
        gates.inner,
        gates.stride,
        gates.inner_stride,
        weight.numel() // width,
        width,
        eps,
        gates_first=gates_first,
        block=block,
        num_warps=warps_of(block),
    )
    return out


def _example(gates_first: bool) -> Tensor:
    return gated_rms_norm(floats(2048, 32, 128), floats(2048, 32, 128), floats(128), 1e-5, gates_first)


EXAMPLES = (
    Example("the gate first", lambda: _example(gates_first=True)),
    Example("the norm first", lambda: _example(gates_first=False)),
)

"""The gates of feed-forward layers whose gate and up projections lie side by side: a program is a piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of, rows_of, warps_of

_MOST_COLUMNS = 2048


@triton.jit
def _gate(
    x, out, inner, stride, inner_stride, width, alpha, limit, is_clamped: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_real = column < width
    place = x + row // inner * stride + row % inner * inner_stride + column
    gate = tl.load(place, is_real, 0.0).to(tl.float32)
    up = tl.load(place + width, is_real, 0.0).to(tl.float32)
    if is_clamped:
        # comparisons that leave NaN what it is
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = gate / (1.0 + tl.exp(-gate * alpha)) * (up + 1.0)
    else:
        # rounded between, as two calls would
        result = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), is_real)


def silu_and_mul(x_T2I: Tensor) -> Tensor:
    return _launch(x_T2I, 1.0, 0.0, is_clamped=False)


def clamped_swiglu(x_T2I: Tensor, alpha: float, limit: float) -> Tensor:
    return _launch(x_T2I, alpha, limit, is_clamped=True)


def _launch(x: Tensor, alpha: float, limit: float, is_clamped: bool) -> Tensor:
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    rows = rows_of(x)
    block = min(block_of(width), _MOST_COLUMNS)
    launch(
        _gate,
        (rows.count, -(-width // block)),
        rows.tensor,
        out,
        rows.inner,
        rows.stride,
        rows.inner_stride,
        width,
        alpha,
        limit,
        is_clamped=is_clamped,
        block=block,
        num_warps=warps_of(block),
    )
    return out


def _example(num_tokens: int) -> Tensor:
    return floats(num_tokens, 2 * 14336)


EXAMPLES = (
    Example("one token of 8B", lambda: silu_and_mul(_example(1))),
    Example("a prompt of 8B", lambda: silu_and_mul(_example(2048))),
    Example("clamped", lambda: clamped_swiglu(_example(2048), 1.702, 7.0)),
)

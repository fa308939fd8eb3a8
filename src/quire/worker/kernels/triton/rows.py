"""Rows of a tensor as kernels address them, without a copy where slices of a fused projection come in."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Row r begins `r // inner * stride + r % inner * inner_stride` numbers behind the start of `tensor`."""

    tensor: Tensor
    count: int
    inner: int
    stride: int
    inner_stride: int


def rows_of(x: Tensor) -> Rows:
    """The rows along the last dimension, those of all other dimensions one after the other."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if x.ndim == 1:
        return Rows(x, 1, 1, 0, 0)
    outer = x.shape[:-1]
    strides = x.stride()[:-1]
    # dimensions, innermost first, that go on where the one within them ends
    inner = outer[-1]
    position = len(outer) - 2
    while position >= 0 and strides[position] == strides[-1] * inner:
        inner *= outer[position]
        position -= 1
    if position < 0:
        return Rows(x, inner, 1, strides[-1], 0)
    rest = 1
    rest_stride = strides[position]
    while position >= 0:
        if strides[position] != rest_stride * rest:
            x = x.contiguous()
            return Rows(x, x.numel() // max(x.shape[-1], 1), 1, x.shape[-1], 0)
        rest *= outer[position]
        position -= 1
    return Rows(x, rest * inner, inner, rest_stride, strides[-1])


def block_of(width: int) -> int:
    """The least power of two that holds so many columns."""
    return int(triton.next_power_of_2(max(width, 1)))


def warps_of(block: int) -> int:
    """Eight numbers a thread, within what a program may have."""
    return min(max(block // 256, 1), 16)

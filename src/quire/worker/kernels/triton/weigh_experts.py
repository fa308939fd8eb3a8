"""What the experts of a token say, as one sum, in the order of the experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch

_BLOCK = 1024


@triton.jit
def _weigh_experts(
    x, weights, out,
    stride, inner_stride, weight_stride, width,
    top_k: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_real = column < width
    total = tl.zeros([block], tl.float32)
    for number in range(top_k):
        row = tl.load(x + token * stride + number * inner_stride + column, is_real, 0.0).to(tl.float32)
        total += row * tl.load(weights + token * weight_stride + number)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), is_real)


def weigh_experts(x_TKN: Tensor, weights_TK: Tensor) -> Tensor:
    num_tokens, top_k, width = x_TKN.shape
    out = x_TKN.new_empty((num_tokens, width))
    if x_TKN.stride(-1) != 1:
        x_TKN = x_TKN.contiguous()
    launch(
        _weigh_experts,
        (num_tokens, triton.cdiv(width, _BLOCK)),
        x_TKN,
        weights_TK.contiguous(),
        out,
        x_TKN.stride(0),
        x_TKN.stride(1),
        top_k,
        width,
        top_k=top_k,
        block=_BLOCK,
    )
    return out


def _example() -> object:
    return weigh_experts(floats(2048, 8, 2048), floats(2048, 8, dtype=torch.float32))


EXAMPLES = (Example("Qwen3-30B-A3B", _example),)

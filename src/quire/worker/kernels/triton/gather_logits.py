"""Rows of logits as float32, in other memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch

_BLOCK = 1024


@triton.jit
def _gather_logits(logits, rows, out, stride, out_stride, vocab_size, block: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_token = token < vocab_size
    value = tl.load(logits + row * stride + token, is_token, 0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * out_stride + token, value, is_token)


def gather_logits(logits_NV: Tensor, rows_n: Tensor, out_nV: Tensor) -> None:
    vocab_size = logits_NV.shape[1]
    grid = (len(rows_n), triton.cdiv(vocab_size, _BLOCK))
    launch(
        _gather_logits, grid, logits_NV, rows_n, out_nV, logits_NV.stride(0), out_nV.stride(0), vocab_size, block=_BLOCK
    )


def _example() -> None:
    gather_logits(floats(256, 128256), given(range(64)), floats(64, 128256, dtype=torch.float32))


EXAMPLES = (Example("64 rows of 8B", _example),)

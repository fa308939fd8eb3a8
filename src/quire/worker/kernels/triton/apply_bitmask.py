"""Excludes tokens by a bit each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["mask_stride", "num_words"])
def _apply_bitmask(logits, rows, mask, stride, mask_stride, vocab_size, num_words, block: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    # beyond the mask nothing is allowed
    word = tl.load(mask + tl.program_id(0) * mask_stride + token // 32, token // 32 < num_words, 0)
    is_excluded = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * stride + token, float("-inf"), is_excluded & (token < vocab_size))


def apply_bitmask(logits_NV: Tensor, rows_n: Tensor, mask_nW: Tensor) -> None:
    vocab_size = logits_NV.shape[1]
    launch(
        _apply_bitmask,
        (len(rows_n), triton.cdiv(vocab_size, _BLOCK)),
        logits_NV,
        rows_n,
        mask_nW,
        logits_NV.stride(0),
        mask_nW.stride(0),
        vocab_size,
        mask_nW.shape[1],
        block=_BLOCK,
    )


def _example() -> None:
    mask = floats(64, 4008, dtype=torch.float32).view(torch.int32)
    apply_bitmask(floats(256, 128256, dtype=torch.float32), given(range(64)), mask)


EXAMPLES = (Example("64 rows of 8B", _example),)

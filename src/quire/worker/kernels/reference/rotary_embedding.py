"""Rotary position embedding in the NeoX layout: dimension i is paired with dimension i + R / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(positions_T: Tensor, query_THD: Tensor, key_TKD: Tensor, cos_sin_cache_PR: Tensor) -> None:
    """In place on query and key. `cos_sin_cache_PR` is float32: R / 2 cosines, then R / 2 sines for each position.

    Dimensions from R on stay as they are. In bfloat16 and float16 the products are float32 and rounded once;
    Transformers rounds cosine and sine first, which is a little less accurate.
    """
    cos_T1r, sin_T1r = cos_sin_cache_PR[positions_T][:, None].chunk(2, dim=-1)
    half = cos_T1r.shape[-1]
    for x_THD in (query_THD, key_TKD):
        first, second = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
        turned = torch.cat((first * cos_T1r - second * sin_T1r, second * cos_T1r + first * sin_T1r), dim=-1)
        x_THD[..., : 2 * half] = turned.to(x_THD.dtype)

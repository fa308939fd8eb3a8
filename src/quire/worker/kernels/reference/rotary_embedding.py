"""Rotary position embedding: in the NeoX layout dimension i is paired with i + R / 2, interleaved 2 i with 2 i + 1."""

from __future__ import annotations

from torch import Tensor


def rotary_embedding(
    positions_T: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    cos_sin_cache_PR: Tensor,
    is_interleaved: bool = False,
) -> None:
    """In place on query and key. `cos_sin_cache_PR` is float32: R / 2 cosines, then R / 2 sines for each position.

    Dimensions from R on stay as they are. In bfloat16 and float16 the products are float32 and rounded once;
    Transformers rounds cosine and sine first, which is a little less accurate.
    """
    cos_T1r, sin_T1r = cos_sin_cache_PR[positions_T][:, None].chunk(2, dim=-1)
    size = cos_sin_cache_PR.shape[-1]
    half = size // 2
    firsts, seconds = (slice(0, size, 2), slice(1, size, 2)) if is_interleaved else (slice(half), slice(half, size))
    for x_THD in (query_THD, key_TKD):
        first, second = x_THD[..., firsts].float(), x_THD[..., seconds].float()
        turned = first * cos_T1r - second * sin_T1r, second * cos_T1r + first * sin_T1r
        x_THD[..., firsts], x_THD[..., seconds] = turned[0].to(x_THD.dtype), turned[1].to(x_THD.dtype)

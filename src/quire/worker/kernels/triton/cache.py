"""What kernels are given of a cache whose rows may be codes (`cache_format.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.cache_format import codes_of, has_scales, scales_of


def numbers_and_scales(cache: Tensor, has_fp8: bool) -> tuple[Tensor, Tensor]:
    """[blocks, heads, places, dim], and the scales of codes, [blocks, heads, places]; without any, the cache again.

    Eight-bit floats come as bytes where the device does not know them.
    """
    if not has_scales(cache.dtype):
        return cache, cache
    codes = codes_of(cache)
    is_bytes = cache.dtype == torch.float8_e4m3fn and not has_fp8
    return codes if is_bytes else codes.view(cache.dtype), scales_of(cache)

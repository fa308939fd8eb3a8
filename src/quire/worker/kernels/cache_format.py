"""What a cache holds: numbers of a type, or codes of one byte, `int8` or `fp8` (e4m3), with a scale for each row.

A row is the key or the value of one token and head. Codes and scales of a block lie together, so that whoever copies
blocks copies bytes and need not know:

    cache[block, head]    codes [block_size, dim], then scales [block_size], float32      number = code * scale

The last dimension of such a cache is therefore `dim + 4`. The scale of a row is its largest magnitude divided by the
largest code. A row with a NaN or an infinity has the scale NaN; one below 1e-30 throughout is zero. Of the e4m3 codes,
those with an exponent of 0 (below 2^-6) are not used, but for zero: they are 28,000 times smaller than the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
DTYPE_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_NORMAL = 2.0**-6
_LEAST_MAGNITUDE = 1e-30


def has_scales(dtype: torch.dtype) -> bool:
    return dtype in _LARGEST_CODE


def row_elements(dim: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache for rows of so many numbers."""
    return dim + SCALE_BYTES if has_scales(dtype) else dim


def codes_of(cache: Tensor) -> Tensor:
    """[blocks, heads, block_size, dim], as bytes: not every operation knows eight-bit floats."""
    block_size, width = cache.shape[2:]
    codes = cache.view(torch.uint8).flatten(2)[..., : block_size * (width - SCALE_BYTES)]
    return codes.unflatten(-1, (block_size, width - SCALE_BYTES))


def scales_of(cache: Tensor) -> Tensor:
    """[blocks, heads, block_size]."""
    block_size, width = cache.shape[2:]
    return cache.view(torch.uint8).flatten(2)[..., block_size * (width - SCALE_BYTES) :].view(torch.float32)


def encoded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and a scale for each row."""
    rows, largest_code = rows.float(), _LARGEST_CODE[dtype]
    largest = rows.abs().amax(-1)
    is_usable = largest.isfinite() & (largest >= _LEAST_MAGNITUDE)
    # A number over a tensor would be the inverse times the number, which is rounded twice.
    factor = torch.where(is_usable, torch.full_like(largest, largest_code) / largest, 0.0)[..., None]
    scaled = torch.where(is_usable[..., None], rows * factor, 0.0)
    if dtype == torch.int8:
        codes = scaled.round().to(torch.int8)
    else:
        codes = torch.where(scaled.abs() >= _LEAST_NORMAL, scaled, 0.0).to(dtype)
    zero_or_nan = torch.where(largest < _LEAST_MAGNITUDE, 0.0, torch.nan)
    return codes.view(torch.uint8), torch.where(is_usable, largest / largest_code, zero_or_nan)


def decoded(cache: Tensor, blocks: Tensor) -> Tensor:
    """The numbers of some blocks, as float32: [*blocks.shape, heads, block_size, dim]."""
    if not has_scales(cache.dtype):
        return cache[blocks].float()
    return codes_of(cache)[blocks].view(cache.dtype).float() * scales_of(cache)[blocks][..., None]

"""The block formats of GGUF as codes with scales.

A block holds 32 or 256 weights: their codes, and one or several scales. Each function below takes blocks as bytes,
[B, bytes of a block], and gives their codes [B, weights], scales and offsets [B, groups], so that

    w = scales * codes + offsets

are the numbers of the format, to the last bit in float32. Codes of 4 bits are 0 to 15 with groups of 32, or twice the
values of 4-bit floats; all others become numbers of 6 or 8 bits, with groups of 16 or 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """Codes are uint8 (4 bits) or int8 (more bits; or twice the values of 4-bit floats)."""

    bits: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


Decode: TypeAlias = Callable[[Tensor], Blocks]
# The sixteen numbers that a code of IQ4_NL stands for.
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_ZERO_OF_4_BITS = 8
_LEAST_SCALE = 2.0**-24  # of float16
# Twice the numbers of a 4-bit float with two bits of exponent and one of mantissa.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """A float16 at this byte of each block, as [B, 1] in float32."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).to(torch.float32)


def _low_then_high(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then their high halves: [..., n] to [..., 2 n]."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1)


def _bits_of(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[B, n] to [B, len(shifts) * n]: the fields at the first shift of all bytes, then those at the next."""
    return torch.cat([(packed >> shift) & mask for shift in shifts], dim=-1)


def q4_0(blocks: Tensor) -> Blocks:
    """A block of zeros has no scale, from which nobody could tell the zero point; it gets one, and its codes say 0."""
    scale = _half(blocks, 0)
    is_zero = scale == 0
    codes = _low_then_high(blocks[:, 2:]).masked_fill(is_zero, _ZERO_OF_4_BITS)
    scale = scale.masked_fill(is_zero, _LEAST_SCALE)
    return Blocks(4, codes, scale, scale * -_ZERO_OF_4_BITS)


def q4_1(blocks: Tensor) -> Blocks:
    return Blocks(4, _low_then_high(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits, one a weight, as [B, 32] of 0 or 16."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1) << 4


def q5_0(blocks: Tensor) -> Blocks:
    codes = _low_then_high(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Blocks(6, codes.to(torch.int8) - 16, _half(blocks, 0))


def q5_1(blocks: Tensor) -> Blocks:
    codes = _low_then_high(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Blocks(6, codes.to(torch.int8), _half(blocks, 0), _half(blocks, 2))


def q8_0(blocks: Tensor) -> Blocks:
    return Blocks(8, blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes, as [B, 8] each: four whole, four in pieces."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 0xF) | ((first >> 6) << 4)), dim=1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.to(torch.float32), mins.to(torch.float32)


def q4_k(blocks: Tensor) -> Blocks:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    # 32 bytes hold two groups: low halves, high halves.
    codes = _low_then_high(blocks[:, 16:].view(-1, 4, 32)).flatten(1)
    return Blocks(4, codes, _half(blocks, 0) * scales, -(_half(blocks, 2) * mins))


def q5_k(blocks: Tensor) -> Blocks:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    high = _bits_of(blocks[:, 16:48], tuple(range(8)), 1) << 4
    codes = _low_then_high(blocks[:, 48:].view(-1, 4, 32)).flatten(1) | high
    return Blocks(6, codes.to(torch.int8), _half(blocks, 0) * scales, -(_half(blocks, 2) * mins))


def q6_k(blocks: Tensor) -> Blocks:
    low = _low_then_high(blocks[:, :128].view(-1, 2, 64))
    high = _bits_of(blocks[:, 128:192].view(-1, 2, 32), (0, 2, 4, 6), 3) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return Blocks(6, (low | high).flatten(1).to(torch.int8) - 32, _half(blocks, 208) * scales)


def q2_k(blocks: Tensor) -> Blocks:
    scales, mins = (blocks[:, :16] & 0xF).to(torch.float32), (blocks[:, :16] >> 4).to(torch.float32)
    codes = _bits_of(blocks[:, 16:80].view(-1, 2, 32), (0, 2, 4, 6), 3).flatten(1)
    return Blocks(6, codes.to(torch.int8), _half(blocks, 80) * scales, -(_half(blocks, 82) * mins))


def q3_k(blocks: Tensor) -> Blocks:
    packed = blocks[:, 96:108]
    low = _low_then_high(packed[:, :8])
    high = _bits_of(packed[:, 8:], (0, 2, 4, 6), 3) << 4
    scales = (low | high).to(torch.float32) - 32
    codes = _bits_of(blocks[:, 32:96].view(-1, 2, 32), (0, 2, 4, 6), 3).flatten(1).to(torch.int8)
    # The third bit is stored upside down: where it is 0, 4 is taken off.
    is_low = 1 - _bits_of(blocks[:, :32], tuple(range(8)), 1).to(torch.int8)
    return Blocks(6, codes - 4 * is_low, _half(blocks, 108) * scales)


def iq4_nl(blocks: Tensor) -> Blocks:
    return Blocks(8, _looked_up(_NON_LINEAR, _low_then_high(blocks[:, 2:])), _half(blocks, 0))


def iq4_xs(blocks: Tensor) -> Blocks:
    low = torch.stack((blocks[:, 4:8] & 0xF, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    high = torch.stack([(blocks[:, 2:4] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1) << 4
    scales = (low | high).to(torch.float32) - 32
    codes = _low_then_high(blocks[:, 8:].view(-1, 8, 16)).flatten(1)
    return Blocks(8, _looked_up(_NON_LINEAR, codes), _half(blocks, 0) * scales)


def mxfp4(blocks: Tensor) -> Blocks:
    """The scale is a power of two; half of it, as the numbers in the table are doubled."""
    scale = torch.ldexp(torch.ones(blocks.shape[0], 1), blocks[:, :1].to(torch.int32) - 128)
    return Blocks(4, _looked_up(_E2M1, _low_then_high(blocks[:, 1:])), scale)


def _looked_up(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.int8)[codes.int()]


DECODERS: dict[str, Decode] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}

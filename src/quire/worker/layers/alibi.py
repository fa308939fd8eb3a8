"""ALiBi, positions as a bias of attention: a score falls by a slope of its head for each token that a key is behind."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, most: float = 8.0) -> Tensor:
    """[num_heads] in float32: powers of 2 with exponents that are evenly spread up to -most. Where heads are no power
    of two, every second one of the next power's comes first, then those between."""
    total = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, total + 1, dtype=torch.float32, device="cpu") * (most / total)
    slopes = 1.0 / 2.0**exponents
    if total != num_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes

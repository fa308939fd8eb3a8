"""Numbers in another type, to the nearest."""

from __future__ import annotations

import torch
from torch import Tensor


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)

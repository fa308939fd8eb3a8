"""What several ranks compute together (4.3.1), each operator called by all of them at the same place of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels import operators
from quire.worker.kernels.reference.all_reduce import HEAD_BYTES

# of a place in which a rank leaves what it brings; what is longer goes in pieces
_PLACE_BYTES = 1 << 20


def meeting_bytes(size: int) -> int:
    """How much zeroed memory so many ranks must share."""
    return HEAD_BYTES + 2 * size * _PLACE_BYTES


def all_reduce(x: Tensor, bias: Tensor | None, meeting: Tensor, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """The sum of what all ranks bring, plus `bias` once, in float32 and then rounded to `dtype`."""
    return operators.all_reduce(x, bias, meeting, rank, size, dtype)

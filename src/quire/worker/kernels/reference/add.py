"""The end of a residual branch where no norm follows."""

from __future__ import annotations

from torch import Tensor


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, two tensors of one shape and type."""
    return x + y

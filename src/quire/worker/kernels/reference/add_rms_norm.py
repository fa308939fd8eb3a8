"""The end of one residual branch and the norm at the head of the next."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels.reference.rms_norm import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum is rounded to the dtype of x first: it goes on as the residual, and the norm sees the same values."""
    total = x + residual
    return rms_norm(total, weight, eps), total

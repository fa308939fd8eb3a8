"""The gate of feed-forward layers that bound what they multiply (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor


def clamped_swiglu(x_T2I: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) with [gate | up] side by side, gate at most `limit`, up within +-`limit`.

    In float32, rounded once.
    """
    gate_TI, up_TI = x_T2I.float().chunk(2, dim=-1)
    gate_TI = gate_TI.clamp(max=limit)
    up_TI = up_TI.clamp(-limit, limit)
    return (gate_TI * torch.sigmoid(gate_TI * alpha) * (up_TI + 1)).to(x_T2I.dtype)

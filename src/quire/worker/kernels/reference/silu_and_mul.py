"""The gate of a feed-forward layer whose gate and up projections are one matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x_T2I: Tensor) -> Tensor:
    """silu(gate) * up with [gate | up] side by side; silu is rounded to the dtype of x, as two separate calls would."""
    gate_TI, up_TI = x_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI

"""Activations of feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# In the order of `Activation` in csrc/cpu/kernels.h.
ACTIVATIONS = ("relu", "silu", "sigmoid", "tanh", "gelu", "gelu_tanh")


def activate(x: Tensor, kind: int) -> Tensor:
    """The activation of this index in ACTIVATIONS, element by element."""
    match ACTIVATIONS[kind]:
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "tanh":
            return torch.tanh(x)
        case "gelu":
            return F.gelu(x)
        case _:
            return F.gelu(x, approximate="tanh")

"""Root mean square normalisation, rounded where LlamaRMSNorm of Transformers rounds."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 inside; rounded to the dtype of x before the multiplication with the weight."""
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return weight * (x_f32 * scale).to(x.dtype)

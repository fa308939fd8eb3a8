"""Rows side by side."""

from __future__ import annotations

import torch
from torch import Tensor


def join(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=-1)

"""Excludes tokens by a bit each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def apply_bitmask(logits_NV: Tensor, rows_n: Tensor, mask_nW: Tensor) -> None:
    """In place: logits[rows[i], token] becomes -inf where bit `token % 32` of mask[i, token // 32] (int32) is 0, or
    beyond the mask."""
    num_beyond = max(0, logits_NV.shape[1] - 32 * mask_nW.shape[1])
    bits = torch.arange(32, dtype=torch.int32, device=mask_nW.device)
    is_allowed_nV = ((mask_nW.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits_NV.shape[1]].bool()
    masked_nV = logits_NV[rows_n].masked_fill(F.pad(~is_allowed_nV, (0, num_beyond), value=True), -torch.inf)
    logits_NV[rows_n] = masked_nV

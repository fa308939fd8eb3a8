"""Rows of logits as float32, in other memory."""

from __future__ import annotations

from torch import Tensor


def gather_logits(logits_NV: Tensor, rows_n: Tensor, out_nV: Tensor) -> None:
    """out[i] = logits[rows[i]]."""
    out_nV.copy_(logits_NV.index_select(0, rows_n))

"""Rows of a packed weight: the embedding that is tied to a head."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.reference.packed_format import dequantized_rows


def packed_rows(packed: Tensor, ids_T: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    """Row ids_T[t] of the weight, dequantised and rounded to `dtype`. `num_columns` is that of the weight."""
    assert num_columns >= 0
    return dequantized_rows(packed, ids_T).to(dtype)

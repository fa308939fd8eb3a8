"""Rows of a packed weight: the embedding that is tied to a head."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.reference.look_up import rows_here
from quire.worker.kernels.reference.packed_format import dequantized_rows, read_header


def packed_rows(
    packed: Tensor, ids_T: Tensor, dtype: torch.dtype, num_columns: int, first: int | None = None
) -> Tensor:
    """Row ids_T[t] of the weight, dequantised and rounded to `dtype`; it has `num_columns`. `first`: see `look_up`."""
    assert num_columns >= 0
    if first is None:
        return dequantized_rows(packed, ids_T).to(dtype)
    num_rows = read_header(packed).num_rows
    return rows_here(ids_T - first, num_rows, lambda ids: dequantized_rows(packed, ids).to(dtype))

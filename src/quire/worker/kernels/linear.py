"""Packed weights: a weight in the layout in which it is multiplied fastest, as a vector of bytes that describes itself.

What each function means is written in `reference/<name>.py`, the layout in `csrc/cpu/matmul.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels import operators
from quire.worker.kernels.reference.packed_format import read_header


def pack_quantized(
    values_NK: Tensor, scales_NG: Tensor, offsets_NG: Tensor | None, *, bits: int, weight_only: bool
) -> Tensor:
    """A packed copy of a quantised weight: scales * values + offsets, with a scale for each K / G inputs.

    `values_NK` has a byte for each value, int8 or unsigned; `bits` is 4 (codes 0 to 15, or int8: twice the values of
    4-bit floats), 6 (-32 to 31, or codes 0 to 63) or 8. A group of inputs is a multiple of 4. Unless `weight_only`,
    activations are rounded to 8 bits on the way, with a scale for each token and 128 inputs, and integers are
    multiplied.
    """
    return operators.pack_quantized(values_NK, scales_NG, offsets_NG, bits, weight_only)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None, num_rows: int | None = None) -> Tensor:
    """x W^T + bias in the dtype of x.

    A row of x gives the same bits whatever other rows there are. `num_rows`, that is N, saves reading the header;
    torch.compile must be told, because it never sees the bytes.
    """
    if num_rows is None:
        num_rows = read_header(packed).num_rows
    return operators.packed_linear(x, packed, bias, num_rows)


def sliced_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, num_rows: int, *, num_slices: int, dtype: torch.dtype
) -> Tensor:
    """x W^T + bias, rounded to `dtype`, where the sums over so many slices of the inputs are added in a fixed tree.

    Ranks that own slices 0 to 3 and 4 to 7 of a weight sum them up with the same bits as one that owns all.
    """
    return operators.sliced_linear(x, packed, bias, num_rows, num_slices, dtype)


def packed_rows(
    packed: Tensor, ids_T: Tensor, dtype: torch.dtype, num_columns: int | None = None, first: int | None = None
) -> Tensor:
    """Rows of the weight [T, K], dequantised: what an embedding tied to a packed head reads. `first`: see `look_up`."""
    if num_columns is None:
        num_columns = read_header(packed).num_columns
    return operators.packed_rows(packed, ids_T, dtype, num_columns, first)

"""A product whose sums are formed in slices of the inputs, so that ranks which own some of them get the same bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.kernels.reference.packed_format import dequantized_rows, read_header
from quire.worker.kernels.reference.packed_linear import rounded_to_int8
from quire.worker.kernels.reference.sums import tree_sum


def sliced_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, num_rows: int, num_slices: int, dtype: torch.dtype
) -> Tensor:
    """x W^T + bias, rounded once to `dtype`; float32 inside, the inputs in `num_slices` parts of one size, whose
    products are added as `sums.py` says. What `packed_linear` says of quantised inputs holds for each slice."""
    header = read_header(packed)
    assert header.num_rows == num_rows
    is_rounded = header.is_quantized and not header.is_weight_only
    weight = dequantized_rows(packed)
    slices = zip(x.float().chunk(num_slices, dim=-1), weight.chunk(num_slices, dim=-1), strict=True)
    total = tree_sum([F.linear(rounded_to_int8(of_x) if is_rounded else of_x, of_weight) for of_x, of_weight in slices])
    return (total if bias is None else total + bias.float()).to(dtype)

"""Linear layers whose weight is packed, and what quantised activations are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.kernels.reference.packed_format import dequantized_rows, read_header

# Inputs of a token that share a scale.
QUANTIZED_TOGETHER = 128
# Smaller ones count as zero.
SMALLEST_INPUT = 1e-30


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    """y = x W^T + bias, float32 inside, rounded once to the dtype of x. `num_rows` is that of the weight.

    With a quantised weight that is not weight-only, x is rounded to 8 bits first: what is multiplied then are integers,
    and sums of so few of them are exact in float32 too.
    """
    header = read_header(packed)
    assert header.num_rows == num_rows
    x_f32 = x.float()
    if header.is_quantized and not header.is_weight_only:
        x_f32 = rounded_to_int8(x_f32)
    y = F.linear(x_f32, dequantized_rows(packed), None if bias is None else bias.float())
    return y.to(x.dtype)


def rounded_to_int8(x: Tensor) -> Tensor:
    """To the nearest multiple (ties to even) of the largest of 128 inputs of a token, divided by 127."""
    pieces = []
    for piece in x.split(QUANTIZED_TOGETHER, dim=-1):
        largest = piece.abs().amax(-1, keepdim=True)
        # A number divided by a tensor would be rounded twice, and ties come out differently.
        inverse = torch.where(largest > SMALLEST_INPUT, torch.full_like(largest, 127.0) / largest, 0.0)
        pieces.append((piece * inverse).round() * (largest / 127))
    return torch.cat(pieces, dim=-1)

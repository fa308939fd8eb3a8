"""What the experts of a token say, as one sum."""

from __future__ import annotations

from torch import Tensor


def weigh_experts(x_TKN: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, N]: the sum over K of weight * row, in float32 and in the order of K, rounded once."""
    total_TN = x_TKN[:, 0].float() * weights_TK[:, 0, None]
    for number in range(1, x_TKN.shape[1]):
        total_TN = total_TN + x_TKN[:, number].float() * weights_TK[:, number, None]
    return total_TN.to(x_TKN.dtype)

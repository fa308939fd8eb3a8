"""A feed-forward layer without a gate."""

from __future__ import annotations

from torch import Tensor, nn

from quire.worker.layers.activation import activation as activation_of
from quire.worker.layers.linear import ColumnParallelLinear, RowParallelLinear


class PlainMLP(nn.Module):
    """down(act(up(x)))"""

    def __init__(self, size: int, inner: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(size, inner, bias=bias)
        self.act = activation_of(activation)
        self.down_proj = RowParallelLinear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))

"""Feed-forward layers, with a gate and without."""

from __future__ import annotations

from torch import Tensor, nn

from quire.worker.layers.activation import GatedActivation
from quire.worker.layers.activation import activation as activation_of
from quire.worker.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear


class PlainMLP(nn.Module):
    """down(act(up(x)))"""

    def __init__(self, size: int, inner: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(size, inner, bias=bias)
        self.act = activation_of(activation)
        self.down_proj = RowParallelLinear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, size: int, inner: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(size, [inner, inner], bias=bias)
        self.act = GatedActivation(activation)
        self.down_proj = RowParallelLinear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))

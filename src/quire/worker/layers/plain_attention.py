"""Attention whose layer gives queries and keys no positions: these are slopes of the scores, or come from elsewhere."""

from __future__ import annotations

from torch import Tensor, nn

from quire.worker.attention import Attention
from quire.worker.layers.linear import QKVParallelLinear, RowParallelLinear


class PlainAttention(nn.Module):
    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        name: str,
        bias: bool = True,
        slopes: Tensor | None = None,
        scale: float | None = None,
        part: str = "",
    ) -> None:
        """`scale`: of queries times keys, where it is not 1 / sqrt(head_dim)."""
        super().__init__()
        self.head_dim = size // num_heads
        self.qkv_proj = QKVParallelLinear(size, self.head_dim, num_heads, num_kv_heads, bias=bias)
        self.o_proj = RowParallelLinear(size, size, bias=bias)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if scale is None else scale,
            name=f"{name}.attn",
            slopes=slopes,
            part=part,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        return self.o_proj(self.attn(*self.qkv_proj(hidden)))

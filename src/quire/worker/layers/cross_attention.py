"""Attention of a text to what an encoder made of its source, whose keys and values are made once."""

from __future__ import annotations

from torch import Tensor, nn

from quire.messages import SOURCE
from quire.worker.attention import Attention
from quire.worker.layers.linear import ColumnParallelLinear, RowParallelLinear


class CrossAttention(nn.Module):
    """`bias`: of all but the keys."""

    def __init__(
        self, size: int, num_heads: int, head_dim: int, scale: float, *, name: str, bias: bool, heads_option: str
    ) -> None:
        """`heads_option`: what config.json calls the number of heads, for who divides it by too many ranks."""
        super().__init__()
        inner = num_heads * head_dim
        self.query = ColumnParallelLinear(size, inner, bias=bias)
        self.key = ColumnParallelLinear(size, inner, bias=False)
        self.value = ColumnParallelLinear(size, inner, bias=bias)
        num_own_heads = self.query.group.share_of(num_heads, heads_option)
        self.attn = Attention(num_own_heads, num_own_heads, head_dim, scale, name=f"{name}.attn", part=SOURCE)
        self.o_proj = RowParallelLinear(inner, size, bias=bias)

    def remember(self, encoded_AE: Tensor) -> None:
        self.attn.store(self.key(encoded_AE), self.value(encoded_AE))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.query(hidden)))

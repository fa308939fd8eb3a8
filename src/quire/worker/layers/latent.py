"""Keys and values that are kept as one latent vector a token, and the projection from it to those of each head.

A head's key is W_UK c and its value W_UV c, for the latent vector c that the cache holds. Neither is ever made:

    score   q . (W_UK c)           =  (q W_UK) . c             `to_latent` turns queries, once a token
    output  sum of p * (W_UV c)    =  W_UV (sum of p * c)      `to_values` turns what attention has summed up

so that attention has one head of keys, of which values are a part. It is always computed in this form, however many
tokens a step has: a token's bits do not depend on how its prompt was cut.

Checkpoints hold both matrices as one, `kv_b_proj`, in the direction that is not computed for keys. Here they are two
layers, each in the direction in which it is multiplied, so that loading, quantising and packing treat them as any
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker import kernels
from quire.worker.layers.linear import ColumnParallelLinear
from quire.worker.layers.packing import pack, pack_quantized
from quire.worker.layers.parameter import take_quantized
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import read


class HeadLinear(ColumnParallelLinear):
    """A linear layer for each head, with inputs of its own: [T, heads, inputs] -> [T, heads, outputs].

    Its weight is [heads * outputs, inputs], one head's below the other's.
    """

    def __init__(self, num_heads: int, in_features: int, head_outputs: int) -> None:
        super().__init__(in_features, num_heads * head_outputs, bias=False)
        # a rank owns whole heads
        self.num_heads = self.group.share_of(num_heads, "num_attention_heads")
        self.head_outputs = head_outputs
        # views of `packed`, by head
        self.packed_heads: list[Tensor] = []

    def pack_weights(self) -> None:
        """Each head's matrix, packed one after the other in one tensor."""
        if self.packed is None:
            codes = take_quantized(self.weight)
            whole: Tensor | QuantizedWeight = self.weight if codes is None else codes
            starts = range(0, self.out_features, self.head_outputs)
            heads = [_packed(whole.narrow(0, start, self.head_outputs)) for start in starts]
            packed = [head for head in heads if head is not None]
            if len(packed) < len(heads):
                return
            self.packed = torch.cat(packed)
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        # all heads are packed alike, so they have one length; the tensor may have come from a file
        self.packed_heads = list(self.packed.chunk(self.num_heads))

    def forward(self, x_THK: Tensor) -> Tensor:
        if self.packed is None:
            weight_HNK = self.weight.view(self.num_heads, self.head_outputs, -1)
            return torch.einsum("thk,hnk->thn", x_THK, weight_HNK).contiguous()
        return kernels.grouped_linear(x_THK, None, self.packed_heads, [], self.head_outputs)


def _packed(weight: Tensor | QuantizedWeight) -> Tensor | None:
    return pack_quantized(weight) if isinstance(weight, QuantizedWeight) else pack(weight, is_grouped=True)


class LatentProjection(nn.Module):
    """`kv_b_proj` of checkpoints, in the two directions that are computed; `latent_parts` takes it apart."""

    def __init__(self, latent_dim: int, num_heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.keys = HeadLinear(num_heads, key_dim, latent_dim)
        self.values = HeadLinear(num_heads, latent_dim, value_dim)
        # of this rank
        self.num_heads = self.keys.num_heads

    def to_latent(self, query_THK: Tensor) -> Tensor:
        """[T, heads, key_dim] -> [T, heads, latent_dim]: queries of the latent vectors."""
        turned: Tensor = self.keys(query_THK)
        return turned

    def to_values(self, latent_THL: Tensor) -> Tensor:
        """[T, heads, latent_dim] -> [T, heads, value_dim]."""
        values: Tensor = self.values(latent_THL)
        return values


def latent_parts(
    key_dim: int, value_dim: int, module: str = "kv_b_proj"
) -> Callable[[str, Any], list[tuple[str, Any]]]:
    """A `convert` of a CheckpointMap: `kv_b_proj.weight` [heads * (key_dim + value_dim), latent_dim], a head's key
    before its value, as the weights of a LatentProjection.

    Codes of values stay as they are. A scale that keys share along the latent vector would be another one for each
    input of the turned matrix, which no layout holds: they become floats.
    """
    name_of_weight = f".{module}.weight"

    def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
        if not name.endswith(name_of_weight):
            return [(name, weight)]
        path = name.removesuffix("weight")
        weight = read(weight)
        rows_HB = torch.arange(weight.shape[0], device="cpu").view(-1, key_dim + value_dim)
        is_quantized = isinstance(weight, QuantizedWeight)
        select: Callable[[Tensor], Any] = weight.select_rows if is_quantized else lambda rows: weight[rows]
        keys = select(rows_HB[:, :key_dim].flatten())
        if isinstance(keys, QuantizedWeight):
            keys = keys.dequantize(torch.float32)
        turned_HLK = keys.view(len(rows_HB), key_dim, -1).transpose(1, 2)
        return [
            (f"{path}keys.weight", turned_HLK.reshape(-1, key_dim)),
            (f"{path}values.weight", select(rows_HB[:, key_dim:].flatten())),
        ]

    return convert

"""Keys and values that are kept as one latent vector a token, and the projection from it to those of each head.

A head's key is W_UK c and its value W_UV c, for the latent vector c that the cache holds. Neither is ever made:

    score   q . (W_UK c)           =  (q W_UK) . c             `to_latent` turns queries, once a token
    output  sum of p * (W_UV c)    =  W_UV (sum of p * c)      `to_values` turns what attention has summed up

so that attention has one head of keys, of which values are a part. It is always computed in this form, however many
tokens a step has: a token's bits do not depend on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.worker import kernels
from quire.worker.layers.linear import ColumnParallelLinear
from quire.worker.layers.packing import pack
from quire.worker.layers.parameter import dequantize_waiting


class LatentProjection(ColumnParallelLinear):
    """`kv_b_proj` of checkpoints: [heads * (key_dim + value_dim), latent_dim], a head's key before its value.

    Its weight is never quantised: it is small, and used in two directions.
    """

    is_kept_as_float = True

    def __init__(self, latent_dim: int, num_heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__(latent_dim, num_heads * (key_dim + value_dim), bias=False)
        self.latent_dim = latent_dim
        self.key_dim = key_dim
        self.value_dim = value_dim
        # of this rank
        self.num_heads = self.out_features // (key_dim + value_dim)
        # views of `packed`, by head
        self._packed_keys: list[Tensor] = []
        self._packed_values: list[Tensor] = []

    def pack_weights(self) -> None:
        """Each head's two matrices, packed one after the other in one tensor: all keys, then all values."""
        if self.packed is None:
            dequantize_waiting(self.weight)
            keys_HKL, values_HVL = self._by_head()
            parts = [pack(matrix) for matrix in (*keys_HKL.transpose(1, 2), *values_HVL)]
            packed = [part for part in parts if part is not None]
            if len(packed) < len(parts):
                return
            self.packed = torch.cat(packed)
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        # The tensor may have come from a file: how long a packed key is, one shows.
        example = kernels.pack_weight(self.weight.new_zeros(self.latent_dim, self.key_dim))
        keys, values = self.packed.tensor_split([self.num_heads * example.numel()])
        self._packed_keys = list(keys.chunk(self.num_heads))
        self._packed_values = list(values.chunk(self.num_heads))

    def to_latent(self, query_THK: Tensor) -> Tensor:
        """[T, heads, key_dim] -> [T, heads, latent_dim]: queries of the latent vectors."""
        if self.packed is None:
            return torch.einsum("thk,hkl->thl", query_THK, self._by_head()[0])
        return kernels.grouped_linear(query_THK, None, self._packed_keys, [], self.latent_dim)

    def to_values(self, latent_THL: Tensor) -> Tensor:
        """[T, heads, latent_dim] -> [T, heads, value_dim]."""
        if self.packed is None:
            return torch.einsum("thl,hvl->thv", latent_THL, self._by_head()[1])
        return kernels.grouped_linear(latent_THL, None, self._packed_values, [], self.value_dim)

    def _by_head(self) -> tuple[Tensor, Tensor]:
        weight_HBL = self.weight.view(self.num_heads, -1, self.latent_dim)
        keys_HKL, values_HVL = weight_HBL.split([self.key_dim, self.value_dim], dim=1)
        return keys_HKL, values_HVL

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, keys of {self.key_dim} and values of {self.value_dim} from {self.latent_dim}"

"""What happens to the heads of queries and keys before they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.rotary import RotaryEmbedding


@dataclass(frozen=True)
class Heads:
    """Norms, where a model has them, and positions. A layer applies both, or has its backend do it together with the
    write into the cache."""

    rotary: nn.Module
    positions: Tensor
    query_norm: Any = None
    key_norm: Any = None

    def apply(self, query_TF: Tensor, key_TF: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Query and key as they meet, in place where there are no norms."""
        if self.query_norm is not None:
            query_TF = self.query_norm(query_TF.view(-1, query_TF.shape[1] // head_dim, head_dim)).flatten(1)
        if self.key_norm is not None:
            key_TF = self.key_norm(key_TF.view(-1, key_TF.shape[1] // head_dim, head_dim)).flatten(1)
        self.rotary(self.positions, query_TF, key_TF, head_dim)
        return query_TF, key_TF

    def is_one_kernel(self, dtype: torch.dtype) -> bool:
        """Whether `kernels.prepare_heads` can do it: positions of one dimension, and norms of the heads' own type."""
        norms = [norm for norm in (self.query_norm, self.key_norm) if norm is not None]
        return (
            type(self.rotary).forward is RotaryEmbedding.forward
            and len({norm.eps for norm in norms}) <= 1
            and all(type(norm).forward is RMSNorm.forward and norm.weight.dtype == dtype for norm in norms)
        )

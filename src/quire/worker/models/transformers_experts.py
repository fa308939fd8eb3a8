"""Experts of a Transformers model on Quire's kernels: those whose weights are stacked as most families have them.

Owns: which modules qualify, and their packed weights. Who computes a token stays the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.worker import kernels

# What Transformers says of a class of experts, and what it must say: [gate | up] and down, [experts, outputs, inputs].
_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


class PackedExperts(nn.Module):
    """Stands in the place of the experts of a layer, with their weights in the processor's layout."""

    def __init__(self, experts: Any, first: list[Tensor], last: list[Tensor]) -> None:
        super().__init__()
        self.first = first
        self.last = last
        # of a gate and what it gates, as the model computes it; no part of this module
        self._gated: list[Callable[[Tensor], Tensor]] = [experts._apply_gate]
        self.inner_size = experts.gate_up_proj.shape[1]
        self.size = experts.down_proj.shape[1]
        self.num_weights = experts.gate_up_proj.numel() + experts.down_proj.numel()
        experts.gate_up_proj = experts.down_proj = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ids_TK = top_k_index.int()
        inner = kernels.grouped_linear(hidden_states, ids_TK, self.first, [], self.inner_size)
        inner = self._gated[0](inner).contiguous()
        out_TKH = kernels.grouped_linear(inner, ids_TK, self.last, [], self.size)
        return kernels.weigh_experts(out_TKH, top_k_weights.float())


def packed_experts(module: nn.Module, pack: Callable[[Tensor], Tensor | None]) -> PackedExperts | None:
    """None: no experts, or of another layout."""
    stacked = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, Tensor) and weight.ndim == 3 and weight.device.type == "cpu" for weight in stacked):
        return None
    if any(getattr(module, name, None) is not value for name, value in _LAYOUT.items()):
        return None
    first, last = ([pack(matrix) for matrix in weight.data] for weight in stacked if weight is not None)
    packed_first = [weight for weight in first if weight is not None]
    packed_last = [weight for weight in last if weight is not None]
    if len(packed_first) < len(first) or len(packed_last) < len(last):
        return None
    return PackedExperts(module, packed_first, packed_last)

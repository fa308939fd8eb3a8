"""Normalisation: one fused kernel, or under torch.compile plain PyTorch, which the compiler fuses further."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor, nn

from quire.worker import kernels
from quire.worker.forward_context import is_traced
from quire.worker.kernels import reference
from quire.worker.layers.parameter import Part, make_parameter
from quire.worker.layers.ranks import current_group


class RMSNorm(nn.Module):
    """Root mean square norm of Llama and its relatives, over the last dimension."""

    def __init__(self, size: int, eps: float = 1e-6, *, is_zero_centred: bool = False) -> None:
        """`is_zero_centred`: checkpoints hold what is to be added to one."""
        super().__init__()
        self.weight = make_parameter(size, pick=_one_more if is_zero_centred else None)
        self.eps = eps

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x); with a residual (norm(x + residual), x + residual)."""
        source = reference if is_traced() else kernels
        if residual is None:
            return source.rms_norm(x, self.weight, self.eps)
        return source.add_rms_norm(x, residual, self.weight, self.eps)


class PlainNorm(RMSNorm):
    """Without a weight: one for all dimensions."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)


class ProjectionNorm(nn.Module):
    """A norm over the outputs of a projection whose heads ranks share: over those of all ranks together.

    They are brought together, so that each rank divides by the number that one worker would, to the last bit. Sums of
    squares would be less to exchange, and rounded otherwise for each number of ranks.
    """

    def __init__(self, size: int, eps: float) -> None:
        """`size`: of all ranks."""
        super().__init__()
        self.group = current_group()
        self.weight = make_parameter(size)
        self.eps = eps

    def forward(self, x_TF: Tensor) -> Tensor:
        """Of this rank's outputs, which are as many."""
        group, num_own = self.group, x_TF.shape[1]
        if group.size == 1:
            return self._normed(x_TF)
        # a head of keys that there are too few of is kept by several ranks, and counts once
        num_shares = len(self.weight) // num_own
        gathered = group.all_gather(x_TF.contiguous(), group.size * num_own).unflatten(1, (num_shares, -1, num_own))
        normed = self._normed(gathered[:, :, 0].flatten(1))
        return normed.narrow(1, group.rank * num_shares // group.size * num_own, num_own)

    def _normed(self, x_TF: Tensor) -> Tensor:
        source = reference if is_traced() else kernels
        return source.rms_norm(x_TF, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """A norm with a gate, in the order of Mamba 2 (`gates_first`) or of Gated DeltaNet."""

    def __init__(self, size: int, eps: float, *, gates_first: bool, num_groups: int | None = None) -> None:
        """`num_groups`: the last dimension is cut into so many rows; without it, rows [..., size] share a weight."""
        super().__init__()
        self.weight = make_parameter(size)
        self.eps = eps
        self.gates_first = gates_first
        self.num_groups = num_groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        source = reference if is_traced() else kernels
        if self.num_groups is None:
            return source.gated_rms_norm(x, gate, self.weight, self.eps, self.gates_first)
        rows, gates = (y.unflatten(-1, (self.num_groups, -1)) for y in (x, gate))
        weight = self.weight.view(self.num_groups, -1)
        return source.gated_rms_norm(rows, gates, weight, self.eps, self.gates_first).flatten(-2)


def _one_more(whole: Tensor, weight: Any, part: Part) -> tuple[Tensor, Any]:
    return whole, weight.float() + 1.0


class LayerNorm(nn.Module):
    """Mean and variance norm with weight and bias."""

    def __init__(self, size: int, eps: float = 1e-5, *, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = make_parameter(size) if affine else None
        self.bias = make_parameter(size) if affine and bias else None

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As RMSNorm's."""
        source = reference if is_traced() else kernels
        summed = x if residual is None else x + residual
        # heads are slices of what one product has made of queries, keys and values
        normed = source.layer_norm(summed.contiguous(), self.weight, self.bias, self.eps)
        return normed if residual is None else (normed, summed)

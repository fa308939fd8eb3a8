"""Normalisation: one fused kernel, or under torch.compile plain PyTorch, which the compiler fuses further."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from quire.worker import kernels
from quire.worker.kernels import reference
from quire.worker.layers.parameter import make_parameter


class RMSNorm(nn.Module):
    """Root mean square norm of Llama and its relatives, over the last dimension."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = make_parameter(size)
        self.eps = eps

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x); with a residual (norm(x + residual), x + residual)."""
        source = reference if torch.compiler.is_compiling() else kernels
        if residual is None:
            return source.rms_norm(x, self.weight, self.eps)
        return source.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Mean and variance norm with weight and bias."""

    def __init__(self, size: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = make_parameter(size) if affine else None
        self.bias = make_parameter(size) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        source = reference if torch.compiler.is_compiling() else kernels
        return source.layer_norm(x, self.weight, self.bias, self.eps)

"""Activations by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from quire.errors import ModelError, suggestion
from quire.worker import kernels
from quire.worker.forward_context import is_traced
from quire.worker.kernels import reference
from quire.worker.kernels.reference.activate import ACTIVATIONS

Activation: TypeAlias = Callable[[Tensor], Tensor]


def _fused(name: str) -> Activation:
    kind = ACTIVATIONS.index(name)

    def run(x: Tensor) -> Tensor:
        return reference.activate(x, kind) if is_traced() else kernels.activate(x, kind)

    return run


def _squared_relu(x: Tensor) -> Tensor:
    positive = _RELU(x)
    return positive * positive


_GELU_TANH, _RELU, _SILU = _fused("gelu_tanh"), _fused("relu"), _fused("silu")
_BY_NAME: dict[str, Activation] = {
    "gelu": _fused("gelu"),
    "gelu_fast": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": _RELU,
    "relu2": _squared_relu,
    "sigmoid": _fused("sigmoid"),
    "silu": _SILU,
    "swish": _SILU,
    "tanh": _fused("tanh"),
}


def activation(name: str) -> Activation:
    """The function of this name."""
    if name not in _BY_NAME:
        raise ModelError(
            f"config.json: activation {name!r} is not among {', '.join(_BY_NAME)}.{suggestion(name, _BY_NAME)} "
            "Try model_impl=transformers."
        )
    return _BY_NAME[name]


class GatedActivation(nn.Module):
    """act(first half) * second half: the output of a merged gate and up projection."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.activation = activation(name)

    def forward(self, gate_up: Tensor) -> Tensor:
        if self.activation is _SILU:
            source = reference if is_traced() else kernels
            return source.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up


class ClampedSwiGLU(nn.Module):
    """gate * sigmoid(alpha * gate) * (up + 1), both halves bounded: what gpt-oss has in place of SiLU."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        if limit <= 0:
            raise ModelError(f"config.json: swiglu_limit={limit} must be above 0. Correct config.json.")
        self.alpha = alpha
        self.limit = limit

    def forward(self, gate_up: Tensor) -> Tensor:
        source = reference if is_traced() else kernels
        return source.clamped_swiglu(gate_up, self.alpha, self.limit)

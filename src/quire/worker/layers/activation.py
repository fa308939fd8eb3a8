"""Activations by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ModelError, suggestion
from quire.worker import kernels
from quire.worker.kernels import reference

Activation: TypeAlias = Callable[[Tensor], Tensor]

_GELU_TANH: Activation = partial(F.gelu, approximate="tanh")
_BY_NAME: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_fast": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
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
        if self.activation is F.silu and not torch.compiler.is_compiling():
            return kernels.silu_and_mul(gate_up)
        if self.activation is F.silu:
            return reference.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up

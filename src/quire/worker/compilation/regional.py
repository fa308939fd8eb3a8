"""Compile each layer of a model on its own instead of the model as a whole.

All layers of a kind share one compiled artefact, so a cold start costs the compilation of one layer: 15 s instead of
119 s for 28 layers, at the same speed afterwards. Shapes are dynamic in the number of tokens.

A step of one token runs uncompiled. The compiler always makes code of its own for a size of one, and for rotary
embedding in place that fails inside torch 2.13 (KeyError in the scheduler of its backend).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import OptionError
from quire.worker.attention import attention_layers
from quire.worker.layers.experts import Experts
from quire.worker.state_cache import recurrent_layers


def compile_layers(model: nn.Module) -> int:
    """Compile, on first use, every layer that holds attention; returns how many there are."""
    if recurrent_layers(model):
        raise OptionError(
            f"compile=True: {type(model).__name__} has recurrent layers beside others, and code is made once for "
            "layers that are alike. Use compile=False."
        )
    if any(isinstance(module, Experts) for module in model.modules()):
        raise OptionError(
            f"compile=True: {type(model).__name__} has experts, whose rows depend on what is computed, and no code is "
            "made for that. Use compile=False."
        )
    layers = _repeated_layers(model)
    if not layers:
        raise OptionError(
            f"compile=True: {type(model).__name__} has no list of layers with attention to compile. Use compile=False."
        )
    # A layer's number reaches the attention operator as an attribute. As a constant it would force a copy per layer.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True)
    _leave_single_tokens_uncompiled(model)
    return len(layers)


def _leave_single_tokens_uncompiled(model: nn.Module) -> None:
    forward = model.forward

    def forward_by_size(input_ids: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if len(input_ids) > 1:
            return forward(input_ids, *arguments, **keywords)
        with torch.compiler.set_stance("force_eager"):
            return forward(input_ids, *arguments, **keywords)

    model.forward = forward_by_size


def _repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost module lists in which every member holds attention."""
    found: list[nn.Module] = []
    for child in model.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if members and all(attention_layers(member) for member in members):
            found += members
        else:
            found += _repeated_layers(child)
    return found

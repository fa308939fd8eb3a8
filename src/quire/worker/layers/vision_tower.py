"""Encoders of images as CLIP and SigLIP have them: patches that see all patches of their image.

A patch comes as its pixels in a row, so the convolution that makes vectors of patches is a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ModelError


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def tower_activation(name: str, key: str) -> Callable[[Tensor], Tensor]:
    """The function that `key` of config.json names."""
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: {key}={str(name)[:40]!r}: must be one of {', '.join(_ACTIVATIONS)}. Take the config.json "
            "that belongs to the weights."
        )
    return _ACTIVATIONS[name]


class TowerAttention(nn.Module):
    """Each patch sees all patches."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size = vision.hidden_size
        self.num_heads = vision.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def forward(self, hidden_PE: Tensor) -> Tensor:
        heads_HPD = [
            project(hidden_PE).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return self.out_proj(F.scaled_dot_product_attention(*heads_HPD).transpose(0, 1).flatten(1))


class TowerMLP(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.activation = tower_activation(vision.hidden_act, "vision_config.hidden_act")
        self.fc1 = nn.Linear(vision.hidden_size, vision.intermediate_size)
        self.fc2 = nn.Linear(vision.intermediate_size, vision.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class TowerLayer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.layer_norm2 = nn.LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.self_attn = TowerAttention(vision)
        self.mlp = TowerMLP(vision)

    def forward(self, hidden_PE: Tensor) -> Tensor:
        hidden_PE = hidden_PE + self.self_attn(self.layer_norm1(hidden_PE))
        return hidden_PE + self.mlp(self.layer_norm2(hidden_PE))


class TowerEmbeddings(nn.Module):
    """Patches with their places. With `has_class`, a vector that stands for the whole image comes first."""

    def __init__(self, vision: Any, *, bias: bool = True, has_class: bool = False) -> None:
        super().__init__()
        side = vision.patch_size
        size = vision.hidden_size
        self.patch_embedding = nn.Conv2d(vision.num_channels, size, side, stride=side, bias=bias)
        self.position_embedding = nn.Embedding((vision.image_size // side) ** 2 + has_class, size)
        self.class_embedding = nn.Parameter(torch.empty(size)) if has_class else None

    def forward(self, patches_PC: Tensor, place_P: Tensor) -> Tensor:
        """`place_P`: row by row."""
        weight = self.patch_embedding.weight
        embedded_PE = F.linear(patches_PC.to(weight.dtype), weight.flatten(1), self.patch_embedding.bias)
        if self.class_embedding is None:
            return embedded_PE + self.position_embedding(place_P)
        placed_PE = embedded_PE + self.position_embedding(place_P + 1)
        first_1E = self.class_embedding[None] + self.position_embedding.weight[:1]
        return torch.cat((first_1E, placed_PE))

"""Encoders of images as CLIP and SigLIP have them: patches that see all patches of their image.

A patch comes as its pixels in a row, so the convolution that makes vectors of patches is a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        query_PE, key_PE, value_PE = (project(hidden_PE) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attended(query_PE, key_PE, value_PE, self.num_heads))


def attended(query_PE: Tensor, key_PE: Tensor, value_PE: Tensor, num_heads: int) -> Tensor:
    """What each patch sees of all patches."""
    heads_HPD = [x.unflatten(1, (num_heads, -1)).transpose(0, 1) for x in (query_PE, key_PE, value_PE)]
    return F.scaled_dot_product_attention(*heads_HPD).transpose(0, 1).flatten(1)


class TowerMLP(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.activation = tower_activation(vision.hidden_act, "vision_config.hidden_act")
        self.fc1 = nn.Linear(vision.hidden_size, vision.intermediate_size)
        self.fc2 = nn.Linear(vision.intermediate_size, vision.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class GatedTowerMLP(nn.Module):
    def __init__(self, vision: Any, *, bias: bool) -> None:
        super().__init__()
        size, inner = vision.hidden_size, vision.intermediate_size
        self.activation = tower_activation(vision.hidden_act, "vision_config.hidden_act")
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=bias), nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


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


class ChoosingTower(nn.Module):
    """CLIP's or SigLIP's, from the patches of one image, row by row, to what the layers of these numbers made of each.
    Layers behind the last of them are not there: `unused` names what a checkpoint has of it."""

    def __init__(self, vision: Any, layers: list[int], *, is_clip: bool) -> None:
        super().__init__()
        size = vision.hidden_size
        self.chosen_layers = layers
        self.num_before = int(is_clip)
        self.embeddings = TowerEmbeddings(vision, bias=not is_clip, has_class=is_clip)
        self.pre_layrnorm = nn.LayerNorm(size, vision.layer_norm_eps) if is_clip else nn.Identity()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(TowerLayer(vision) for _ in range(max(layers)))})
        behind = [f"encoder.layers.{index}." for index in range(max(layers), vision.num_hidden_layers)]
        self.unused = [*behind, "post_layernorm.", "head."]

    def forward(self, patches_PC: Tensor, height: int, width: int) -> Tensor:
        """`height` and `width` in patches."""
        place_P = torch.arange(height * width, device=patches_PC.device)
        hidden_PE = self.pre_layrnorm(self.embeddings(patches_PC, place_P))
        return made_by(self.encoder["layers"], self.chosen_layers, hidden_PE)[self.num_before :]


def made_by(layers: Iterable[nn.Module], chosen: Sequence[int], hidden_PE: Tensor, *arguments: Tensor) -> Tensor:
    """What the layers of these numbers make of it, side by side; 0 is what the first one is given."""
    made = {0: hidden_PE}
    for number, layer in enumerate(layers, start=1):
        hidden_PE = layer(hidden_PE, *arguments)
        if number in chosen:
            made[number] = hidden_PE
    return torch.cat([made[number] for number in chosen], dim=1)


def places_by_square(height: int, width: int, merge_size: int) -> Tensor:
    """Row and column of each patch, [P, 2], square by square of merge_size x merge_size patches."""
    rows_HW = torch.arange(height, device="cpu")[:, None].expand(height, width)
    columns_HW = torch.arange(width, device="cpu")[None].expand(height, width)
    squares = (height // merge_size, merge_size, width // merge_size, merge_size)
    return torch.stack([x.reshape(squares).transpose(1, 2).flatten() for x in (rows_HW, columns_HW)], dim=1)


def turned(x_HPD: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    """By angles of each patch; the second half of a head belongs to the first."""
    wide_HPD = x_HPD.float()
    first, second = wide_HPD.chunk(2, dim=-1)
    return (wide_HPD * cos_PD + torch.cat((-second, first), dim=-1) * sin_PD).to(x_HPD.dtype)

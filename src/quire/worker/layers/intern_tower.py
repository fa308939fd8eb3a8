"""InternViT: an encoder of square tiles, whose layers scale what they add. Squares of patches become one token each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.parameter import make_parameter
from quire.worker.layers.vision_tower import TowerMLP, attended, places_by_square
from quire.worker.staging import send

_QK_EPS = 1e-6


class InternAttention(nn.Module):
    """Each patch sees all patches. Queries and keys may be normalised, all heads together."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, bias = vision.hidden_size, vision.attention_bias
        self.num_heads = vision.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size, bias=bias) for _ in range(3))
        self.projection_layer = nn.Linear(size, size)
        self.q_norm: nn.Module = RMSNorm(size, _QK_EPS) if vision.use_qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(size, _QK_EPS) if vision.use_qk_norm else nn.Identity()

    def forward(self, hidden_PE: Tensor) -> Tensor:
        query_PE, key_PE = self.q_norm(self.q_proj(hidden_PE)), self.k_norm(self.k_proj(hidden_PE))
        return self.projection_layer(attended(query_PE, key_PE, self.v_proj(hidden_PE), self.num_heads))


class InternLayer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.attention = InternAttention(vision)
        self.mlp = TowerMLP(vision)
        self.layernorm_before, self.layernorm_after = _make_norm(vision), _make_norm(vision)
        self.lambda_1, self.lambda_2 = make_parameter(vision.hidden_size), make_parameter(vision.hidden_size)

    def forward(self, hidden_PE: Tensor) -> Tensor:
        hidden_PE = hidden_PE + self.lambda_1 * self.attention(self.layernorm_before(hidden_PE))
        return hidden_PE + self.lambda_2 * self.mlp(self.layernorm_after(hidden_PE))


def _make_norm(vision: Any) -> nn.Module:
    if vision.norm_type not in ("layer_norm", "rms_norm"):
        raise ModelError(
            f"config.json: vision_config.norm_type={str(vision.norm_type)[:40]!r}: must be layer_norm or rms_norm. "
            "Take the config.json that belongs to the weights."
        )
    kind = nn.LayerNorm if vision.norm_type == "layer_norm" else RMSNorm
    return kind(vision.hidden_size, vision.layer_norm_eps)


class InternEmbeddings(nn.Module):
    """Patches with their places, and before them a vector that stands for the whole tile."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, side = vision.hidden_size, vision.patch_size
        num_patches = (vision.image_size // side) ** 2
        self.cls_token = make_parameter(1, 1, size)
        self.position_embeddings = (
            make_parameter(1, 1 + num_patches, size) if vision.use_absolute_position_embeddings else None
        )
        self.patch_embeddings = nn.ModuleDict({"projection": nn.Conv2d(vision.num_channels, size, side, stride=side)})

    def forward(self, patches_PC: Tensor, place_P: Tensor) -> Tensor:
        """`place_P`: row by row."""
        convolution: Any = self.patch_embeddings["projection"]
        weight = convolution.weight
        patches_PE = F.linear(patches_PC.to(weight.dtype), weight.flatten(1), convolution.bias)
        hidden_PE = torch.cat((self.cls_token[0], patches_PE))
        if self.position_embeddings is None:
            return hidden_PE
        first_1 = place_P.new_zeros(1)
        return hidden_PE + self.position_embeddings[0, torch.cat((first_1, place_P + 1))]


class InternTower(nn.Module):
    """From the patches of a tile, square by square, to what the layer of this number made of them; 0 is what the first
    one is given. The patches of a square stand side by side. Layers behind it are not there: `unused` names what a
    checkpoint has of them. `is_end`: what the tower as a whole returns, which may be normalised."""

    def __init__(self, vision: Any, layer: int, merge_size: int, *, is_end: bool) -> None:
        super().__init__()
        self.merge_size = merge_size
        self.embeddings = InternEmbeddings(vision)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(InternLayer(vision) for _ in range(layer))})
        self.unused = [f"encoder.layer.{index}." for index in range(layer, vision.num_hidden_layers)]
        self.unused.append("embeddings.mask_token")
        self.layernorm: nn.Module = nn.Identity()
        if is_end and not vision.use_mean_pooling:
            self.layernorm = nn.LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        else:
            self.unused.append("layernorm.")

    def forward(self, patches_PC: Tensor, height: int, width: int) -> Tensor:
        """`height` and `width` in patches."""
        places_P2 = places_by_square(height, width, self.merge_size)
        place_P = places_P2[:, 0] * width + places_P2[:, 1]
        hidden_PE = self.embeddings(patches_PC, send(place_P, patches_PC.device))
        for layer in self.encoder["layer"]:
            hidden_PE = layer(hidden_PE)
        seen_PE: Tensor = self.layernorm(hidden_PE)[1:]
        return seen_PE.reshape(-1, self.merge_size**2 * seen_PE.shape[1])

"""Pixtral's encoder of images: patches of any number of rows and columns, turned by both.

The first half of what turns a head counts rows, the second columns, each with every other of the usual frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.vision_tower import GatedTowerMLP, made_by, places_by_square, turned
from quire.worker.staging import send

_EPS = 1e-5
_THETA = 10_000.0


class PixtralAttention(nn.Module):
    """Each patch sees all patches of its image."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size = vision.hidden_size
        self.num_heads = vision.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, hidden_PE: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
        query_HPD, key_HPD, value_HPD = (
            project(hidden_PE).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query_HPD, key_HPD = turned(query_HPD, cos_PD, sin_PD), turned(key_HPD, cos_PD, sin_PD)
        seen_HPD = F.scaled_dot_product_attention(query_HPD, key_HPD, value_HPD)
        return self.o_proj(seen_HPD.transpose(0, 1).flatten(1))


class PixtralLayer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(vision.hidden_size, _EPS)
        self.ffn_norm = RMSNorm(vision.hidden_size, _EPS)
        self.attention = PixtralAttention(vision)
        self.feed_forward = GatedTowerMLP(vision, bias=False)

    def forward(self, hidden_PE: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
        hidden_PE = hidden_PE + self.attention(self.attention_norm(hidden_PE), cos_PD, sin_PD)
        return hidden_PE + self.feed_forward(self.ffn_norm(hidden_PE))


class PixtralTower(nn.Module):
    """From the patches of one image, square by square of merge_size x merge_size, to what the layers of these numbers
    made of each."""

    def __init__(self, vision: Any, layers: list[int], merge_size: int) -> None:
        super().__init__()
        side = vision.patch_size
        self.merge_size = merge_size
        self.chosen_layers = layers
        self.head_dim = vision.hidden_size // vision.num_attention_heads
        rope: dict[str, Any] = getattr(vision, "rope_parameters", None) or {}
        theta: Any = rope.get("rope_theta") or getattr(vision, "rope_theta", None) or _THETA
        self.theta = float(theta)
        self.patch_conv = nn.Conv2d(vision.num_channels, vision.hidden_size, side, stride=side, bias=False)
        self.ln_pre = RMSNorm(vision.hidden_size, _EPS)
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(PixtralLayer(vision) for _ in range(max(layers)))})
        self.unused = [f"transformer.layers.{index}." for index in range(max(layers), vision.num_hidden_layers)]

    def forward(self, patches_PC: Tensor, height: int, width: int) -> Tensor:
        """`height` and `width` in patches."""
        weight = self.patch_conv.weight
        hidden_PE = self.ln_pre(F.linear(patches_PC.to(weight.dtype), weight.flatten(1)))
        places_P2 = places_by_square(height, width, self.merge_size)
        cos_PD, sin_PD = (send(table, patches_PC.device) for table in self._angles(places_P2))
        return made_by(self.transformer["layers"], self.chosen_layers, hidden_PE, cos_PD, sin_PD)

    def _angles(self, places_P2: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        by_row = places_P2[:, :1] * frequencies[0::2]
        by_column = places_P2[:, 1:] * frequencies[1::2]
        angles_PD = torch.cat((by_row, by_column, by_row, by_column), dim=1)
        return angles_PD.cos(), angles_PD.sin()

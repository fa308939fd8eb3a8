"""The tower of Gemma 4: patches of an image turn, and are learned, by their row and column; a square becomes one token.

An image keeps its ratio, so it has any number of rows and columns of squares. Called by gemma4.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.layers import PlainNorm, RMSNorm, activation, make_parameter
from quire.worker.layers.vision_tower import places_by_square, turned
from quire.worker.staging import send

# of a linear layer: what goes in, what comes out
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(nn.Module):
    """What goes in and what comes out stays within bounds that the checkpoint brings."""

    def __init__(self, vision: Any, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs, bias=False)
        self.bounds = nn.ParameterDict({name: make_parameter() for name in BOUNDS if vision.use_clipped_linears})

    def forward(self, x: Tensor) -> Tensor:
        if not self.bounds:
            return self.linear(x)
        least_in, most_in, least_out, most_out = (self.bounds[name] for name in BOUNDS)
        return self.linear(x.clamp(least_in, most_in)).clamp(least_out, most_out)


class TowerAttention(nn.Module):
    """Each patch sees all patches. Half of a head turns by columns, half by rows."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, dim, eps = vision.hidden_size, vision.head_dim, vision.rms_norm_eps
        self.head_dim = dim
        self.q_proj = ClippedLinear(vision, size, vision.num_attention_heads * dim)
        self.k_proj = ClippedLinear(vision, size, vision.num_key_value_heads * dim)
        self.v_proj = ClippedLinear(vision, size, vision.num_key_value_heads * dim)
        self.o_proj = ClippedLinear(vision, vision.num_attention_heads * dim, size)
        self.q_norm, self.k_norm, self.v_norm = RMSNorm(dim, eps), RMSNorm(dim, eps), PlainNorm(dim, eps)

    def forward(self, hidden_PE: Tensor, cos_P2D: Tensor, sin_P2D: Tensor) -> Tensor:
        query_HPD = self._heads(self.q_proj, self.q_norm, hidden_PE)
        key_HPD = self._heads(self.k_proj, self.k_norm, hidden_PE)
        value_HPD = self._heads(self.v_proj, self.v_norm, hidden_PE)
        query_HPD, key_HPD = (
            turned(x.unflatten(2, (2, -1)), cos_P2D, sin_P2D).flatten(2) for x in (query_HPD, key_HPD)
        )
        seen_HPD = F.scaled_dot_product_attention(query_HPD, key_HPD, value_HPD, scale=1.0, enable_gqa=True)
        return self.o_proj(seen_HPD.transpose(0, 1).flatten(1))

    def _heads(self, project: nn.Module, norm: nn.Module, hidden_PE: Tensor) -> Tensor:
        return norm(project(hidden_PE).unflatten(1, (-1, self.head_dim))).transpose(0, 1)


class TowerMLP(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, inner = vision.hidden_size, vision.intermediate_size
        self.gate_proj, self.up_proj = ClippedLinear(vision, size, inner), ClippedLinear(vision, size, inner)
        self.down_proj = ClippedLinear(vision, inner, size)
        self.act = activation(vision.hidden_activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class TowerLayer(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.self_attn = TowerAttention(vision)
        self.mlp = TowerMLP(vision)
        size, eps = vision.hidden_size, vision.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, hidden_PE: Tensor, cos_P2D: Tensor, sin_P2D: Tensor) -> Tensor:
        attended_PE = self.self_attn(self.input_layernorm(hidden_PE), cos_P2D, sin_P2D)
        hidden_PE = hidden_PE + self.post_attention_layernorm(attended_PE)
        return hidden_PE + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_PE)))


class PatchEmbedder(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.input_proj = nn.Linear(3 * vision.patch_size**2, vision.hidden_size, bias=False)
        self.position_embedding_table = make_parameter(2, vision.position_embedding_size, vision.hidden_size)

    def forward(self, patches_PC: Tensor, places_P2: Tensor) -> Tensor:
        """The weights take colour by colour what belongs to one pixel."""
        by_pixel_PC = patches_PC.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
        of_columns, of_rows = self.position_embedding_table
        scaled_PC = (2 * (by_pixel_PC - 0.5)).to(of_rows.dtype)
        return self.input_proj(scaled_PC) + (of_columns[places_P2[:, 1]] + of_rows[places_P2[:, 0]])


class Tower(nn.Module):
    """From the patches of one image, square by square, to one hidden state for each square: their mean."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.merge_size = vision.pooling_kernel_size
        self.patch_embedder = PatchEmbedder(vision)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(TowerLayer(vision) for _ in range(vision.num_hidden_layers))}
        )
        self.is_standardized = vision.standardize
        if self.is_standardized:
            self.std_bias, self.std_scale = make_parameter(vision.hidden_size), make_parameter(vision.hidden_size)
        half = vision.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
        self.frequencies = 1.0 / (vision.rope_parameters["rope_theta"] ** exponents)

    def forward(self, patches_PC: Tensor, height: int, width: int) -> Tensor:
        """`height` and `width` in patches."""
        places_P2 = places_by_square(height, width, self.merge_size)
        angles_P2F = places_P2.flip(1)[:, :, None] * self.frequencies
        angles_P2D = torch.cat((angles_P2F, angles_P2F), dim=2)
        cos_P2D, sin_P2D = (send(table, patches_PC.device) for table in (angles_P2D.cos(), angles_P2D.sin()))
        hidden_PE = self.patch_embedder(patches_PC, send(places_P2, patches_PC.device))
        for layer in self.encoder["layers"]:
            hidden_PE = layer(hidden_PE, cos_P2D, sin_P2D)
        pooled_QE = hidden_PE.float().unflatten(0, (-1, self.merge_size**2)).mean(1).to(hidden_PE.dtype)
        # in float32 until it is standardized: half precision may not hold it
        scaled_QE = pooled_QE.float() * pooled_QE.shape[1] ** 0.5
        if self.is_standardized:
            scaled_QE = (scaled_QE - self.std_bias.float()) * self.std_scale.float()
        return scaled_QE.to(hidden_PE.dtype)


class Projector(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        self.norm = PlainNorm(vision.hidden_size, vision.rms_norm_eps)
        self.embedding_projection = nn.Linear(vision.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_QE: Tensor) -> Tensor:
        return self.embedding_projection(self.norm(hidden_QE))

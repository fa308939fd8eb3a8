"""Qwen 3 VL: Qwen 3 whose tokens may be those of an image, which enters at several depths.

The tower shows what it sees after some of its blocks, not only at its end: the first layers of the text each get one of
these views added to what they return, at the tokens of the image. So an image's tokens are wide here,
`[embedding | view of layer 0 | view of layer 1 | ...]`, and whoever keeps, cuts and mixes them needs to know no more.

Longer than most: the tower with its learned positions, the views at several depths and the times of videos are here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers.multi_rotary import InterleavedMultiRotaryEmbedding
from quire.worker.layers.vision_tower import TowerMLP, places_by_square
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaLike, LlamaModel, Parts, complete_heads
from quire.worker.models.qwen2_5_vl import (
    VISION_EPS,
    PatchEmbedding,
    VisionBlock,
    check_vision,
    complete_vision,
    take_text_config,
    vision_angles,
)
from quire.worker.models.qwen3 import normed_attention
from quire.worker.staging import send

_VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SECTIONS = [24, 20, 20]


class PatchMerger(nn.Module):
    """The patches of a square become one token."""

    def __init__(self, vision: Any, *, norms_square: bool) -> None:
        """`norms_square`: the norm is over the square, not over each of its patches."""
        super().__init__()
        self.width = vision.hidden_size * vision.spatial_merge_size**2
        self.norm = nn.LayerNorm(self.width if norms_square else vision.hidden_size, VISION_EPS)
        self.fc1 = nn.Linear(self.width, self.width)
        self.fc2 = nn.Linear(self.width, vision.out_hidden_size)

    def forward(self, hidden_PE: Tensor) -> Tensor:
        normed_QE = self.norm(hidden_PE.view(-1, *self.norm.normalized_shape)).view(-1, self.width)
        return self.fc2(F.gelu(self.fc1(normed_QE)))


class VisionTower(nn.Module):
    """From the patches of one image, square by square, to the wide token of each square."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.merge_size = vision.spatial_merge_size
        self.head_dim = vision.hidden_size // vision.num_heads
        self.views = list(vision.deepstack_visual_indexes)
        self.side = math.isqrt(vision.num_position_embeddings)
        self.patch_embed = PatchEmbedding(vision, bias=True)
        self.pos_embed = nn.Embedding(vision.num_position_embeddings, vision.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(vision, nn.LayerNorm, TowerMLP(vision)) for _ in range(vision.depth))
        self.merger = PatchMerger(vision, norms_square=False)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(vision, norms_square=True) for _ in self.views)

    def forward(self, patches_PC: Tensor, height: int, width: int) -> Tensor:
        """`height` and `width` in patches."""
        places_P2 = places_by_square(height, width, self.merge_size)
        cos_PD, sin_PD = (send(table, patches_PC.device) for table in vision_angles(places_P2, self.head_dim))
        hidden_PE = self.patch_embed(patches_PC) + self._positions(places_P2, height, width)
        views: dict[int, Tensor] = {}
        whole = [len(patches_PC)]
        for index, block in enumerate(self.blocks):
            hidden_PE = block(hidden_PE, cos_PD, sin_PD, whole)
            if index in self.views:
                level = self.views.index(index)
                views[level] = self.deepstack_merger_list[level](hidden_PE)
        return torch.cat([self.merger(hidden_PE), *(views[level] for level in range(len(self.views)))], dim=1)

    def _positions(self, places_P2: Tensor, height: int, width: int) -> Tensor:
        """A square of embeddings was learned. It is stretched over the image, corner on corner, and each patch has the
        mean of its four neighbours there, weighed by how near they are."""
        sizes_2 = torch.tensor([height, width], device="cpu")
        place_P2 = places_P2.float() * (self.side - 1) / (sizes_2 - 1).clamp(min=1)
        before_P2 = place_P2.floor()
        after_weight_P2 = place_P2 - before_P2
        neighbours_P22 = torch.stack([before_P2, before_P2 + 1], dim=1).long().clamp(max=self.side - 1)
        weights_P22 = torch.stack([1 - after_weight_P2, after_weight_P2], dim=1)
        index_P4 = (neighbours_P22[:, :, None, 0] * self.side + neighbours_P22[:, None, :, 1]).flatten(1)
        weights_P4 = (weights_P22[:, :, None, 0] * weights_P22[:, None, :, 1]).flatten(1)
        table = self.pos_embed.weight
        learned_P4E = self.pos_embed(send(index_P4, table.device))
        return (learned_P4E * send(weights_P4, table.device)[:, :, None]).sum(1).to(table.dtype)


class DeepstackModel(LlamaModel):
    """Qwen 3's layers; the first of them take views of images."""

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        """`input_embeds` as wide as the tokens of images; the views of text are zeros."""
        if input_embeds is None:
            return super().forward(input_ids, positions, None)
        hidden, *views = (part.contiguous() for part in input_embeds.split(self.norm.weight.shape[0], dim=1))
        residual = None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual)
            if index < len(views):
                hidden = hidden + views[index]
        hidden, _ = self.norm(hidden, residual)
        return hidden


def _make_attention(config: Any, index: int, name: str, rotary: Any) -> LlamaAttention:
    return normed_attention(config, name, rotary)


def complete_config(config: Any) -> None:
    take_text_config(config)
    complete_heads(config)
    name = "rope_scaling" if getattr(config, "rope_scaling", None) else "rope_parameters"
    setattr(config, name, {"mrope_section": _SECTIONS, **(getattr(config, name, None) or {})})
    complete_vision(config, _VISION_DEFAULTS)
    check_vision(config, "gelu_pytorch_tanh")
    _check_views(config)


def _check_views(config: Any) -> None:
    vision = config.vision_config
    views = vision.deepstack_visual_indexes
    if not isinstance(views, list) or sorted(set(views)) != sorted(views) or not set(views) <= set(range(vision.depth)):
        raise ModelError(
            f"config.json: vision_config.deepstack_visual_indexes={str(views)[:60]} must name different blocks of the "
            f"tower, which has depth={vision.depth}. Take the config.json that belongs to the weights."
        )
    if len(views) > config.num_hidden_layers:
        raise ModelError(
            f"config.json: vision_config.deepstack_visual_indexes names {len(views)} blocks, for num_hidden_layers="
            f"{config.num_hidden_layers} layers that take one each. Take the config.json that belongs to the weights."
        )
    if math.isqrt(vision.num_position_embeddings) ** 2 != vision.num_position_embeddings:
        raise ModelError(
            f"config.json: vision_config.num_position_embeddings={vision.num_position_embeddings} must be the square "
            "of a whole number. Take the config.json that belongs to the weights."
        )


class Qwen3VLForConditionalGeneration(LlamaLike):
    architectures: tuple[str, ...] = ("Qwen3VLForConditionalGeneration",)
    parts = Parts(_make_attention, model=DeepstackModel, rotary=InterleavedMultiRotaryEmbedding)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        prefixes={"model.visual.": "visual.", "model.language_model.": "model.", "language_model.": "model."},
        modules={"linear_fc1": "fc1", "linear_fc2": "fc2"},
    )
    config_defaults = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(32),
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vision_config": None,
    }
    complete_config = staticmethod(complete_config)
    takes_images = True
    image_modules = ("visual",)
    has_grid_positions = True

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.visual = VisionTower(config.vision_config)
        self.num_views = len(config.vision_config.deepstack_visual_indexes)
        self.num_image_layers = self.num_views

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """As wide as the tokens of images."""
        embedded = super().embed_tokens(input_ids)
        return F.pad(embedded, (0, self.num_views * embedded.shape[1]))

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """The wide token of each placeholder, out of patches that stand square by square."""
        _, height, width = grid
        tokens: Tensor = self.visual(pixels, height, width)
        return tokens


MODEL = Qwen3VLForConditionalGeneration

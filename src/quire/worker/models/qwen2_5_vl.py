"""Qwen 2.5 VL: Qwen 2 whose tokens may be those of an image, and the tower that makes them out of pixels.

A token of an image attends like any other, to what stands before it; its position has three dimensions. The tower sees
one image at a time: squares of `spatial_merge_size` patches become one token, and most blocks look through windows.

Longer than most: the tower with its windows, positions in three dimensions and times of videos are all here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import RMSNorm
from quire.worker.layers.multi_rotary import MultiRotaryEmbedding
from quire.worker.layers.vision_tower import GatedTowerMLP, places_by_square, turned
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaLike, Parts
from quire.worker.models.qwen2 import Qwen2ForCausalLM, complete_windows, make_attention
from quire.worker.staging import send

VISION_EPS = 1e-6
_VISION_THETA = 10_000.0
_VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


class VisionAttention(nn.Module):
    """Each patch sees all patches of its window."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.num_heads = vision.num_heads
        self.qkv = nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        self.proj = nn.Linear(vision.hidden_size, vision.hidden_size)

    def forward(self, hidden_PE: Tensor, cos_PD: Tensor, sin_PD: Tensor, lengths: list[int]) -> Tensor:
        qkv_3HPD = self.qkv(hidden_PE).unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        query_HPD = turned(qkv_3HPD[0], cos_PD, sin_PD)
        key_HPD = turned(qkv_3HPD[1], cos_PD, sin_PD)
        windows = zip(*(x.split(lengths, dim=1) for x in (query_HPD, key_HPD, qkv_3HPD[2])), strict=True)
        seen = [F.scaled_dot_product_attention(query, key, value) for query, key, value in windows]
        return self.proj(torch.cat(seen, dim=1).transpose(0, 1).flatten(1))


class VisionBlock(nn.Module):
    def __init__(self, vision: Any, make_norm: Callable[[int, float], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = make_norm(vision.hidden_size, VISION_EPS)
        self.norm2 = make_norm(vision.hidden_size, VISION_EPS)
        self.attn = VisionAttention(vision)
        self.mlp = mlp

    def forward(self, hidden_PE: Tensor, cos_PD: Tensor, sin_PD: Tensor, lengths: list[int]) -> Tensor:
        hidden_PE = hidden_PE + self.attn(self.norm1(hidden_PE), cos_PD, sin_PD, lengths)
        return hidden_PE + self.mlp(self.norm2(hidden_PE))


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its width: each patch by itself."""

    def __init__(self, vision: Any, *, bias: bool = False) -> None:
        super().__init__()
        kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.proj = nn.Conv3d(vision.in_channels, vision.hidden_size, kernel, stride=kernel, bias=bias)

    def forward(self, patches_PC: Tensor) -> Tensor:
        return F.linear(patches_PC.to(self.proj.weight.dtype), self.proj.weight.flatten(1), self.proj.bias)


class PatchMerger(nn.Module):
    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.width = vision.hidden_size * vision.spatial_merge_size**2
        self.ln_q = RMSNorm(vision.hidden_size, VISION_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, vision.out_hidden_size)
        )

    def forward(self, hidden_PE: Tensor) -> Tensor:
        return self.mlp(self.ln_q(hidden_PE).view(-1, self.width))


class VisionTower(nn.Module):
    """From the patches of one image, square by square, to one embedding for each square."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.merge_size = vision.spatial_merge_size
        self.window = vision.window_size // vision.spatial_merge_size // vision.patch_size
        self.head_dim = vision.hidden_size // vision.num_heads
        self.full_blocks = frozenset(vision.fullatt_block_indexes)
        self.patch_embed = PatchEmbedding(vision)
        self.blocks = nn.ModuleList(
            VisionBlock(vision, RMSNorm, GatedTowerMLP(vision, bias=True)) for _ in range(vision.depth)
        )
        self.merger = PatchMerger(vision)

    def forward(self, patches_PC: Tensor, height: int, width: int) -> Tensor:
        """`height` and `width` in patches."""
        unit = self.merge_size**2
        order_on_host, window_lengths = self._windows(height // self.merge_size, width // self.merge_size)
        order_Q = send(order_on_host, patches_PC.device)
        order_P = (order_Q[:, None] * unit + torch.arange(unit, device=order_Q.device)).flatten()
        angles = vision_angles(places_by_square(height, width, self.merge_size), self.head_dim)
        cos_PD, sin_PD = (send(table, patches_PC.device)[order_P] for table in angles)
        hidden_PE = self.patch_embed(patches_PC)[order_P]
        for index, block in enumerate(self.blocks):
            lengths = [len(patches_PC)] if index in self.full_blocks else [unit * length for length in window_lengths]
            hidden_PE = block(hidden_PE, cos_PD, sin_PD, lengths)
        merged_QE = self.merger(hidden_PE)
        tokens_QE = torch.empty_like(merged_QE)
        tokens_QE[order_Q] = merged_QE
        return tokens_QE

    def _windows(self, num_rows: int, num_columns: int) -> tuple[Tensor, list[int]]:
        """The squares window by window, and how many each window has."""
        rows_QQ = np.arange(num_rows)[:, None] // self.window
        columns_QQ = np.arange(num_columns) // self.window
        windows_Q = (rows_QQ * -(-num_columns // self.window) + columns_QQ).flatten()
        return torch.from_numpy(np.argsort(windows_Q, kind="stable")), np.bincount(windows_Q).tolist()


def vision_angles(places_P2: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each patch: a quarter of a head turns by rows, a quarter by columns, and the other half as
    these do."""
    quarter = head_dim // 2
    exponents = torch.arange(0, quarter, 2, dtype=torch.float32, device="cpu") / quarter
    angles_P = (places_P2[:, :, None] * (1.0 / _VISION_THETA**exponents)).flatten(1)
    angles_PD = torch.cat((angles_P, angles_P), dim=1)
    return angles_PD.cos(), angles_PD.sin()


def take_text_config(config: Any) -> None:
    """Both spellings: text keys beside `vision_config`, and in a `text_config` of their own."""
    for key, value in (getattr(config, "text_config", None) or {}).items():
        # whether it is tied is said of the whole, or of the text
        if key not in ("model_type", "architectures") and not (key == "tie_word_embeddings" and not value):
            setattr(config, config._names.get(key, key), value)
    for name in ("rope_scaling", "rope_parameters"):
        rope = getattr(config, name, None)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            setattr(config, name, {**rope, "type": "default", "rope_type": "default"})


def complete_vision(config: Any, defaults: dict[str, Any]) -> None:
    """`vision_config` with attributes, what it leaves out included."""
    given = getattr(config, "vision_config", None)
    config.vision_config = SimpleNamespace(**{**defaults, **(given if isinstance(given, dict) else {})})


def _complete(config: Any) -> None:
    take_text_config(config)
    complete_windows(config)
    complete_vision(config, _VISION_DEFAULTS)
    check_vision(config, "silu")


def check_vision(config: Any, activation: str) -> None:
    vision = config.vision_config
    num_heads = vars(vision).get("num_heads") or vision.num_attention_heads
    check_heads(config, vision.hidden_size, num_heads)
    if vision.out_hidden_size != config.hidden_size:
        raise ModelError(
            f"config.json: vision_config.out_hidden_size={vision.out_hidden_size} must be hidden_size="
            f"{config.hidden_size}, what a token of text has. Take the config.json that belongs to the weights."
        )
    if vision.hidden_act != activation:
        raise ModelError(
            f"config.json: vision_config.hidden_act={str(vision.hidden_act)[:40]!r}: must be {activation} for this "
            "model. Take the config.json that belongs to the weights."
        )


def check_heads(config: Any, hidden_size: int, num_heads: int) -> None:
    if hidden_size % num_heads:
        raise ModelError(
            f"{config._file}: vision_config.hidden_size={hidden_size} is no multiple of its {num_heads} heads. Take "
            "the config.json that belongs to the weights."
        )


class Qwen2_5_VLForConditionalGeneration(LlamaLike):  # noqa: N801 (as in config.json)
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    parts = Parts(make_attention, rotary=MultiRotaryEmbedding)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        prefixes={"model.visual.": "visual.", "model.language_model.": "model.", "language_model.": "model."},
        apart=("visual.",),
    )
    config_defaults = {
        **Qwen2ForCausalLM.config_defaults,
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": Nullable(8),
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vision_config": None,
    }
    complete_config = staticmethod(_complete)
    takes_images = True
    image_modules = ("visual",)
    has_grid_positions = True

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.visual = VisionTower(config.vision_config)

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """One embedding for each placeholder, out of patches that stand square by square."""
        _, height, width = grid
        embedded: Tensor = self.visual(pixels, height, width)
        return embedded


MODEL = Qwen2_5_VLForConditionalGeneration

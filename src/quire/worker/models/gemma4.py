"""Gemma 4 as it is published: the text of gemma4_text, and the tower of gemma4_tower, which makes tokens of images.

Where config.json says so, the tokens of an image see each other in the layers with a window, and stand in one step
then. Encoders of sound stay unread.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers.stored_weight import read
from quire.worker.model_config import Nullable
from quire.worker.models.gemma4_text import Gemma4ForCausalLM, complete_config
from quire.worker.models.gemma4_tower import BOUNDS, Projector, Tower
from quire.worker.models.qwen2_5_vl import complete_vision, take_text_config

_VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}
_THETA = 100.0
_TOWER, _PROJECTOR = "vision_tower", "embed_vision"


def complete_whole(config: Any) -> None:
    """The keys of text stand in a `text_config` of their own."""
    take_text_config(config)
    complete_config(config)
    if config.vision_config is None:
        return
    complete_vision(config, _VISION_DEFAULTS)
    vision = config.vision_config
    vision.rope_parameters = {"rope_theta": _THETA, **(vision.rope_parameters or {})}
    kind = vision.rope_parameters.get("rope_type", "axial")
    if kind not in ("axial", "default") or vision.head_dim % 4:
        raise ModelError(
            f"config.json: vision_config.rope_parameters.rope_type={str(kind)[:40]!r}, head_dim={vision.head_dim}: "
            "must be axial, and a multiple of 4: halves of a head turn by columns and by rows. Take the config.json "
            "that belongs to the weights."
        )


def _of_tower(name: str, weight: Any) -> tuple[str, Any]:
    """The bounds of a layer stand by themselves. One that bounds nothing is infinite, which a weight must not be."""
    layer, _, leaf = name.rpartition(".")
    if leaf not in BOUNDS:
        return name, weight
    bound: Any = read(weight)
    most = torch.finfo(torch.bfloat16).max
    return f"{layer}.bounds.{leaf}", bound.clamp(-most, most)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    architectures = ("Gemma4ForConditionalGeneration", *Gemma4ForCausalLM.architectures)
    config_defaults = {
        **Gemma4ForCausalLM.config_defaults,
        "vision_config": None,
        "pad_token_id": Nullable(0),
        "image_token_id": Nullable(258_880),
        "video_token_id": Nullable(258_884),
        "audio_token_id": Nullable(258_881),
    }
    complete_config = staticmethod(complete_whole)
    takes_images = True

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.takes_images = config.vision_config is not None
        if self.takes_images:
            self.image_modules = (_TOWER, _PROJECTOR)
            self.vision_tower = Tower(config.vision_config)
            self.embed_vision = Projector(config)
            self.checkpoint_map = _with_tower(self.checkpoint_map)
        # tokens that stand for what is seen and heard, and what text is looked up in their place
        self.marks = [mark for mark in (config.image_token_id, config.video_token_id, config.audio_token_id) if mark]
        self.pad_token_id = config.pad_token_id or 0

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        return super().forward(self._text_ids(input_ids), positions, input_embeds, intermediate_tensors)

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        return self.model.embed(self._text_ids(input_ids))

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """One embedding for each placeholder, out of patches that stand square by square."""
        _, height, width = grid
        return self.embed_vision(self.vision_tower(pixels, height, width))

    def sees_ahead(self, layer: Attention) -> bool:
        """Whether tokens of an image that is whole see its later ones there."""
        return layer.sliding_window > 0

    def _text_ids(self, input_ids: Tensor) -> Tensor:
        is_mark = torch.zeros_like(input_ids, dtype=torch.bool)
        for mark in self.marks:
            is_mark = is_mark | (input_ids == mark)
        return torch.where(is_mark, self.pad_token_id, input_ids)


def _with_tower(of_text: Any) -> Any:
    """The same table, with the tower's tensors, in which nothing is merged."""
    prefixes = {f"model.{module}.": f"{module}." for module in (_TOWER, _PROJECTOR)}

    def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
        if name.startswith((f"{_TOWER}.", f"{_PROJECTOR}.")):
            return [_of_tower(name, weight)]
        return of_text.convert(name, weight)

    return dataclasses.replace(
        of_text,
        prefixes={**prefixes, **of_text.prefixes},
        ignored_modules=tuple(name for name in of_text.ignored_modules if name not in prefixes),
        convert=convert,
    )


MODEL = Gemma4ForConditionalGeneration

"""Gemma 3 with its eyes: a SigLIP tower, whose patches are pooled to as many tokens for every image.

The tokens of an image see each other, and so all of them stand in one step: that travels with the image
(messages.Media), and attention is told by the rows of images. The text is that of gemma3_text.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import RMSNorm
from quire.worker.layers.vision_tower import TowerEmbeddings, TowerLayer, places_by_square
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.gemma3_text import Gemma3ForCausalLM
from quire.worker.models.gemma3_text import complete_config as complete_text
from quire.worker.models.llama import LlamaLike
from quire.worker.models.qwen2_5_vl import check_vision, complete_vision, take_text_config
from quire.worker.staging import send

_VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class Tower(nn.Module):
    """From the patches of one image, square by square, to a hidden state for each."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.embeddings = TowerEmbeddings(vision)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(TowerLayer(vision) for _ in range(vision.num_hidden_layers))}
        )
        self.post_layernorm = nn.LayerNorm(vision.hidden_size, vision.layer_norm_eps)

    def forward(self, patches_PC: Tensor, place_P: Tensor) -> Tensor:
        hidden_PE = self.embeddings(patches_PC, place_P)
        for layer in self.encoder["layers"]:
            hidden_PE = layer(hidden_PE)
        return self.post_layernorm(hidden_PE)


class Projector(nn.Module):
    """The patches of a square become one token: their mean, in the text's dimensions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        self.mm_soft_emb_norm = RMSNorm(vision.hidden_size, vision.layer_norm_eps, is_zero_centred=True)
        self.mm_input_projection_weight = nn.Parameter(torch.empty(vision.hidden_size, config.hidden_size))

    def forward(self, hidden_PE: Tensor, num_tokens: int) -> Tensor:
        pooled_QE = hidden_PE.view(num_tokens, -1, hidden_PE.shape[1]).mean(1)
        return self.mm_soft_emb_norm(pooled_QE) @ self.mm_input_projection_weight


def _complete(config: Any) -> None:
    take_text_config(config)
    complete_text(config)
    complete_vision(config, _VISION_DEFAULTS)
    config.vision_config.out_hidden_size = config.hidden_size  # the projector's
    check_vision(config, "gelu_pytorch_tanh")
    vision = config.vision_config
    num_tokens = config.mm_tokens_per_image
    patches, tokens = vision.image_size // vision.patch_size, math.isqrt(num_tokens)
    if not tokens or tokens**2 != num_tokens or patches % tokens or vision.image_size % vision.patch_size:
        raise ModelError(
            f"config.json: mm_tokens_per_image={num_tokens} must be a square whose side divides the {patches} patches "
            f"of a side (image_size={vision.image_size}, patch_size={vision.patch_size}). Take the config.json that "
            "belongs to the weights."
        )


class Gemma3ForConditionalGeneration(LlamaLike):
    architectures = ("Gemma3ForConditionalGeneration",)
    parts = Gemma3ForCausalLM.parts
    config_names = Gemma3ForCausalLM.config_names
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        prefixes={
            "model.vision_tower.vision_model.": "vision_tower.",
            "vision_tower.vision_model.": "vision_tower.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.language_model.": "model.",
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
        },
        # it pools a whole image for another purpose
        ignored_modules=(
            "model.vision_tower.vision_model.head.",
            "vision_tower.vision_model.head.",
            "model.vision_tower.head.",
        ),
        apart=("vision_tower.",),
    )
    # logits are not capped here
    config_defaults = {
        **{
            name: value
            for name, value in Gemma3ForCausalLM.config_defaults.items()
            if name != "final_logit_softcapping"
        },
        "vision_config": None,
        "mm_tokens_per_image": 256,
    }
    complete_config = staticmethod(_complete)
    takes_images = True
    image_modules = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.vision_tower = Tower(config.vision_config)
        self.multi_modal_projector = Projector(config)
        self.tokens_of_side = math.isqrt(config.mm_tokens_per_image)

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """One embedding for each placeholder, out of patches that stand square by square."""
        _, height, width = grid
        places_P2 = places_by_square(height, width, height // self.tokens_of_side)
        place_P = places_P2[:, 0] * width + places_P2[:, 1]
        hidden_PE = self.vision_tower(pixels, send(place_P, pixels.device))
        tokens: Tensor = self.multi_modal_projector(hidden_PE, self.tokens_of_side**2)
        return tokens


MODEL = Gemma3ForConditionalGeneration

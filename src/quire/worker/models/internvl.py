"""InternVL: InternViT before Qwen or a relative of it; a square of patches becomes one token, its vectors side by side.

An image is several tiles, which the tower sees one by one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.config.image_sizes import cells_merged, side_of
from quire.errors import ModelError
from quire.worker.models.joined_model import JoinedModel, Projector, complete_with_one_layer


class NormedProjector(Projector):
    def __init__(self, config: Any, inputs: int) -> None:
        super().__init__(config, inputs)
        self.layer_norm = nn.LayerNorm(inputs)

    def forward(self, squares_QE: Tensor) -> Tensor:
        return super().forward(self.layer_norm(squares_QE))


def complete_config(config: Any) -> None:
    complete_with_one_layer(config)
    vision = config.vision
    try:
        config.merge_size = cells_merged(vars(config))
        for name in ("image_size", "patch_size"):
            setattr(vision, name, side_of(getattr(vision, name), f"vision_config.{name}"))
    except ValueError as error:
        raise ModelError(f"config.json: {error} Take the config.json that belongs to the weights.") from error


class InternVLForConditionalGeneration(JoinedModel):
    architectures = ("InternVLForConditionalGeneration",)
    config_defaults = {**JoinedModel.config_defaults, "downsample_ratio": 0.5, "tie_word_embeddings": True}
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len, config.merge_size)
        self.multi_modal_projector = NormedProjector(config, self.tower_width * config.merge_size**2)


MODEL = InternVLForConditionalGeneration

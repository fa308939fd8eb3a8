"""Mistral Small 3.1 and later, and Ministral 3: Pixtral's tower before Mistral; squares of patches become one token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.layers import RMSNorm
from quire.worker.models.joined_model import JoinedModel, Projector, complete_with_one_layer


class PatchMerger(nn.Module):
    """Of a square, dimension by dimension, all its patches."""

    def __init__(self, width: int, merge_size: int) -> None:
        super().__init__()
        self.num_patches = merge_size**2
        self.merging_layer = nn.Linear(width * self.num_patches, width, bias=False)

    def forward(self, hidden_PE: Tensor) -> Tensor:
        squares_QSE = hidden_PE.view(-1, self.num_patches, hidden_PE.shape[1])
        return self.merging_layer(squares_QSE.transpose(1, 2).flatten(1))


class MergingProjector(Projector):
    def __init__(self, config: Any, inputs: int) -> None:
        super().__init__(config, inputs)
        self.norm = RMSNorm(inputs, config.text.rms_norm_eps)
        self.patch_merger = PatchMerger(inputs, config.spatial_merge_size)

    def forward(self, hidden_PE: Tensor) -> Tensor:
        return super().forward(self.patch_merger(self.norm(hidden_PE)))


class Mistral3ForConditionalGeneration(JoinedModel):
    architectures = ("Mistral3ForConditionalGeneration",)
    config_defaults = {
        **JoinedModel.config_defaults,
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_with_one_layer)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len, config.spatial_merge_size)
        self.multi_modal_projector = MergingProjector(config, self.tower_width)


MODEL = Mistral3ForConditionalGeneration

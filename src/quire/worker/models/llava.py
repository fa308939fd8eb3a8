"""LLaVA: CLIP, SigLIP or Pixtral before Llama or a relative of it; each patch becomes one token."""

from __future__ import annotations

from typing import Any

from quire.worker.models.joined_model import JoinedModel, Projector, complete_joined


def complete_config(config: Any) -> None:
    if config.vision_feature_layer is None:
        config.vision_feature_layer = -2
    complete_joined(config)


class LlavaForConditionalGeneration(JoinedModel):
    architectures = ("LlavaForConditionalGeneration",)
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.multi_modal_projector = Projector(config, self.tower_width)


MODEL = LlavaForConditionalGeneration

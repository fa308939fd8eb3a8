"""Qwen 3 VL with experts: its tower and views of images, and Qwen 3's experts in most layers of the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import split_experts
from quire.worker.models.qwen3_moe import experts_or_dense
from quire.worker.models.qwen3_vl import Qwen3VLForConditionalGeneration
from quire.worker.models.qwen3_vl import complete_config as complete_qwen3_vl

_NUM_EXPERTS = 60


def make_mlp(config: Any, index: int) -> nn.Module:
    return experts_or_dense(config, index, is_normalised=True)


def complete_config(config: Any) -> None:
    # of the whole: what the text says of itself does not count
    is_tied = config.tie_word_embeddings
    complete_qwen3_vl(config)
    config.tie_word_embeddings = is_tied
    config.mlp_only_layers = config.mlp_only_layers or []
    if config.num_experts is None:
        config.num_experts = _NUM_EXPERTS if config.num_local_experts is None else config.num_local_experts


def as_kept(hidden_size: int) -> Callable[[str, Any], list[tuple[str, Any]]]:
    """The experts of a layer are one tensor: as published [experts, inputs, outputs], and [experts, outputs, inputs] as
    Transformers saves it. Which one tells the side that hidden states are on."""

    def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
        if isinstance(weight, Tensor) and weight.ndim == 3 and ".experts." in name:
            kept = 1 if name.endswith("down_proj") else 2
            weight = weight if weight.shape[kept] == hidden_size else weight.transpose(1, 2)
        return split_experts(name, weight)

    return convert


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    architectures = ("Qwen3VLMoeForConditionalGeneration",)
    config_defaults = {
        **Qwen3VLForConditionalGeneration.config_defaults,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": Nullable(16),
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts_per_tok": 4,
        "num_experts": None,
        # the same, as Transformers writes it since its fifth version
        "num_local_experts": None,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len, make_mlp)
        self.checkpoint_map = dataclasses.replace(
            self.checkpoint_map, convert=as_kept(config.hidden_size), converts_quantized=True
        )


MODEL = Qwen3VLMoeForConditionalGeneration

"""DeepSeek V3 and R1: version 2 with experts chosen by sigmoids, a learned correction of the choice, and groups."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from quire.worker.layers import Routing
from quire.worker.model_config import Nullable
from quire.worker.models.deepseek_v2 import (
    LATENT_DEFAULTS,
    LatentAttention,
    complete_latent,
    experts_or_dense,
    latent_map,
    refuse_other_values,
)
from quire.worker.models.llama import LlamaLike, MakeAttention, MakeMLP, Parts
from quire.worker.models.multi_token import MultiToken


def complete_config(config: Any) -> None:
    complete_latent(config)
    refuse_other_values(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",), moe_layer_freq=(1,))


def routing_of(config: Any) -> Routing:
    return Routing(
        config.num_experts_per_tok,
        is_sigmoid=True,
        is_normalised=config.norm_topk_prob,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        scale=config.routed_scaling_factor,
    )


def make_mlp(config: Any, index: int) -> nn.Module:
    return experts_or_dense(config, index, routing_of(config), has_correction=True)


def next_layer(
    make_attention: MakeAttention, make_mlp: MakeMLP = make_mlp, *, norm: str = "shared_head.norm.", **further: Any
) -> MultiToken:
    """What guesses a token more is one layer of the model, and lies behind its last one."""
    return MultiToken(
        make_attention,
        make_mlp,
        prefix=lambda config: f"model.layers.{config.num_hidden_layers}.",
        parts={
            "enorm.": "embedding_norm.",
            "hnorm.": "hidden_norm.",
            "eh_proj.": "fc.",
            norm: "norm.",
            "": "layers.0.",
        },
        copies=("embed_tokens.", "shared_head.head."),
        **further,
    )


def drafting_layers(config: Any) -> tuple[str, ...]:
    """Beginnings of names: layers behind the last one only draft."""
    first = config.num_hidden_layers
    return tuple(f"model.layers.{index}." for index in range(first, first + config.num_nextn_predict_layers))


class DeepseekV3ForCausalLM(LlamaLike):
    multi_token = next_layer(LatentAttention, is_interleaved=lambda config: bool(config.rope_interleave))
    architectures = ("DeepseekV3ForCausalLM",)
    parts = Parts(LatentAttention, make_mlp)
    config_defaults = {
        **LATENT_DEFAULTS,
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": Nullable(1),
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        parts = dataclasses.replace(self.parts, is_interleaved=config.rope_interleave)
        super().__init__(config, max_model_len, parts=parts)
        self.checkpoint_map = latent_map(config, drafting_layers(config))


MODEL = DeepseekV3ForCausalLM

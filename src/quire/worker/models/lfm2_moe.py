"""LFM 2 with experts in place of most feed-forward layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers import Experts, GatedMLP, Routing
from quire.worker.models.checkpoint_map import CheckpointMap, split_experts
from quire.worker.models.lfm2 import LFM2_MERGED, LFM2_MODULES, make_mixer, make_norm, place_convolution
from quire.worker.models.llama import LlamaLike, Parts, complete_kv_heads


def make_mlp(config: Any, index: int) -> nn.Module:
    if index < config.num_dense_layers:
        return GatedMLP(config.hidden_size, config.intermediate_size, "silu", bias=False)
    routing = Routing(
        config.num_experts_per_tok,
        is_sigmoid=True,
        is_normalised=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    return Experts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        routing,
        "silu",
        has_correction=config.use_expert_bias,
    )


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    if config.tie_embedding is not None:
        config.tie_word_embeddings = config.tie_embedding


def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
    return [part for split, piece in split_experts(name, weight) for part in place_convolution(split, piece)]


class Lfm2MoeForCausalLM(LlamaLike):
    architectures = ("Lfm2MoeForCausalLM",)
    parts = Parts(make_mixer, make_mlp, make_norm)
    checkpoint_map = CheckpointMap(
        merged={**LFM2_MERGED, "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)},
        modules={**LFM2_MODULES, "expert_bias": "gate.e_score_correction_bias"},
        convert=convert,
        converts_quantized=True,
    )
    config_defaults = {
        "vocab_size": 65_536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "tie_embedding": None,
    }
    complete_config = staticmethod(complete_config)


MODEL = Lfm2MoeForCausalLM

"""Hunyuan 3: Qwen 3's attention, and behind the first layer experts chosen as in DeepSeek V3, beside a shared one."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.errors import ModelError
from quire.worker.layers import Experts, RotaryEmbedding, Routing
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.deepseek_v3 import next_layer
from quire.worker.models.llama import LlamaAttention, LlamaLike, LlamaMLP, Parts, complete_kv_heads
from quire.worker.models.qwen3 import normed_attention

_DENSE, _SPARSE = "dense", "sparse"


def complete_mlp_types(config: Any) -> None:
    """`mlp_layer_types` says which layers have experts: all but the first, where a file leaves it out."""
    kinds = config.mlp_layer_types
    if kinds is None:
        kinds = [_DENSE, *[_SPARSE] * (config.num_hidden_layers - 1)]
    if not isinstance(kinds, list) or len(kinds) != config.num_hidden_layers or set(kinds) - {_DENSE, _SPARSE}:
        raise ModelError(
            f"config.json: mlp_layer_types={str(kinds)[:80]}: must be {_DENSE} or {_SPARSE} for each of the "
            f"{config.num_hidden_layers} layers. Take the config.json that belongs to the weights."
        )
    config.mlp_layer_types = kinds


def is_dense(config: Any, index: int) -> bool:
    kind: str = config.mlp_layer_types[index]
    return kind == _DENSE


def make_mlp(config: Any, index: int) -> nn.Module:
    if is_dense(config, index):
        return LlamaMLP(config, bias=config.mlp_bias)
    return make_experts(config, index)


def make_experts(config: Any, index: int) -> nn.Module:
    shared_size = config.moe_intermediate_size * config.num_shared_experts
    return Experts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        Routing(config.num_experts_per_tok, is_sigmoid=True, scale=config.router_scaling_factor),
        config.hidden_act,
        has_correction=True,
        shared=LlamaMLP(config, bias=config.mlp_bias, inner_size=shared_size),
    )


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    return normed_attention(config, name, rotary)


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    complete_mlp_types(config)


class HYV3ForCausalLM(LlamaLike):
    architectures = ("HYV3ForCausalLM",)
    parts = Parts(make_attention, make_mlp)
    multi_token = next_layer(make_attention, make_experts, norm="final_layernorm.", feeds_normed=True)
    config_names = {"num_local_experts": "num_experts"}
    config_defaults = {
        "vocab_size": 120_832,
        "hidden_size": 4096,
        "intermediate_size": 13_312,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_layer_types": None,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.checkpoint_map = CheckpointMap(
            merged=MERGED,
            modules={
                "router": "",
                "expert_bias": "gate.e_score_correction_bias",
                "shared_mlp": "shared_expert",
            },
            # a layer behind the last one only drafts
            ignored_modules=(f"model.layers.{config.num_hidden_layers}.",),
        )


MODEL = HYV3ForCausalLM

"""Qwen 1.5 and 2 with experts: its attention, experts in most layers, and a gated expert for every token."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers import Experts, RotaryEmbedding, Routing
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, LlamaMLP, Parts, complete_heads
from quire.worker.models.qwen2 import window_of_layer

# What config.json may leave out, here and in Qwen 3 with experts.
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": Nullable(4096),
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
    "tie_word_embeddings": False,
}


def complete_config(config: Any) -> None:
    """Windows are those of every second layer below `max_window_layers`: not what Qwen 2 makes of the same keys."""
    complete_heads(config)
    config.mlp_only_layers = config.mlp_only_layers or []
    if not config.use_sliding_window:
        config.sliding_window = None
    if config.layer_types is None:
        first_without = config.max_window_layers if config.use_sliding_window else 0
        config.layer_types = [
            "sliding_attention" if index % 2 == 0 and index < first_without else "full_attention"
            for index in range(config.num_hidden_layers)
        ]


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    window = window_of_layer(config, index)
    return LlamaAttention(config, name, rotary, qkv_bias=config.qkv_bias, sliding_window=window)


def make_mlp(config: Any, index: int) -> nn.Module:
    if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step or not config.num_experts:
        return LlamaMLP(config, bias=False)
    return make_experts(config, is_normalised=config.norm_topk_prob)


def make_experts(config: Any, *, is_normalised: bool) -> Experts:
    return Experts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        Routing(config.num_experts_per_tok, is_normalised=is_normalised),
        config.hidden_act,
        shared=LlamaMLP(config, bias=False, inner_size=config.shared_expert_intermediate_size),
        has_shared_gate=True,
    )


class Qwen2MoeForCausalLM(LlamaLike):
    architectures = ("Qwen2MoeForCausalLM",)
    parts = Parts(make_attention, make_mlp)
    config_defaults = {
        **DEFAULTS,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": Nullable(16),
        "qkv_bias": True,
        "max_window_layers": 28,
        "layer_types": None,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    }
    complete_config = staticmethod(complete_config)


MODEL = Qwen2MoeForCausalLM

"""Qwen 3 with experts: its attention, and a mixture of experts in place of most feed-forward layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers import Experts, RotaryEmbedding, Routing
from quire.worker.models.llama import LlamaAttention, LlamaLike, LlamaMLP, Parts, complete_kv_heads
from quire.worker.models.qwen2_moe import DEFAULTS
from quire.worker.models.qwen3 import normed_attention


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    if config.num_experts is None:
        config.num_experts = 128 if config.num_local_experts is None else config.num_local_experts
    config.mlp_only_layers = config.mlp_only_layers or []
    if not config.use_sliding_window:
        config.sliding_window = None


def experts_or_dense(config: Any, index: int, *, is_normalised: bool) -> nn.Module:
    is_dense = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step
    if is_dense or not config.num_experts:
        return LlamaMLP(config, bias=False)
    routing = Routing(config.num_experts_per_tok, is_normalised=is_normalised)
    return Experts(config.hidden_size, config.moe_intermediate_size, config.num_experts, routing, config.hidden_act)


def make_mlp(config: Any, index: int) -> nn.Module:
    return experts_or_dense(config, index, is_normalised=config.norm_topk_prob)


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    # a window is one of all layers
    return normed_attention(config, name, rotary, config.sliding_window or 0)


class Qwen3MoeForCausalLM(LlamaLike):
    architectures = ("Qwen3MoeForCausalLM",)
    parts = Parts(make_attention, make_mlp)
    config_defaults = {
        **DEFAULTS,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": None,
        # the same, as Transformers writes it since its fifth version
        "num_local_experts": None,
    }
    complete_config = staticmethod(complete_config)


MODEL = Qwen3MoeForCausalLM

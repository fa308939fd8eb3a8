"""Seed-OSS: Llama with biases on queries, keys and values alone."""

from __future__ import annotations

from typing import Any

from quire.worker.layers import RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    return LlamaAttention(config, name, rotary, qkv_bias=config.attention_bias, output_bias=config.attention_out_bias)


class SeedOssForCausalLM(LlamaLike):
    architectures = ("SeedOssForCausalLM",)
    parts = Parts(make_attention)
    config_defaults = {
        "vocab_size": 155_136,
        "hidden_size": 4096,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": Nullable(8),
        "head_dim": Nullable(128),
        "hidden_act": "silu",
        "max_position_embeddings": 524_288,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


MODEL = SeedOssForCausalLM

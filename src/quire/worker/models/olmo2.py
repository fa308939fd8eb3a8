"""OLMo 2: norms behind each half, and one over the queries of all heads, as over the keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.worker.layers import ProjectionNorm, RotaryEmbedding
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, PostNormDecoderLayer


class Olmo2Attention(LlamaAttention):
    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding, window: int = 0) -> None:
        bias = getattr(config, "attention_bias", False)
        super().__init__(config, name, rotary, qkv_bias=bias, output_bias=bias, sliding_window=window)
        self.q_norm = ProjectionNorm(config.num_attention_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = ProjectionNorm(config.num_key_value_heads * self.head_dim, config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        query, key = self.q_norm(query), self.k_norm(key)
        self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self.attn(query, key, value))


class Olmo2ForCausalLM(LlamaLike):
    architectures = ("Olmo2ForCausalLM",)
    parts = Parts(Olmo2Attention, layer=PostNormDecoderLayer)
    config_defaults = {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


MODEL = Olmo2ForCausalLM

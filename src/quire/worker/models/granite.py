"""Granite 3: Llama with a factor at the embedding, at what each half of a layer adds, at attention, and at the head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.worker.layers import RotaryEmbedding
from quire.worker.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaLike, Parts, norm_of_sum


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    bias = config.attention_bias
    return LlamaAttention(config, name, rotary, qkv_bias=bias, output_bias=bias, scale=config.attention_multiplier)


class GraniteDecoderLayer(LlamaDecoderLayer):
    """What each half gives is scaled before it is added."""

    def __init__(self, config: Any, *modules: Any) -> None:
        super().__init__(config, *modules)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = norm_of_sum(self.input_layernorm, hidden, residual)
        hidden = self.self_attn(positions, hidden) * self.residual_multiplier
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden) * self.residual_multiplier, residual


class GraniteForCausalLM(LlamaLike):
    architectures: tuple[str, ...] = ("GraniteForCausalLM",)
    parts = Parts(make_attention, layer=GraniteDecoderLayer)
    config_defaults: dict[str, Any] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }

    def __init__(self, config: Any, max_model_len: int, *, parts: Parts | None = None) -> None:
        super().__init__(config, max_model_len, parts=parts, embedding_multiplier=config.embedding_multiplier)
        self.logits_scaling = config.logits_scaling

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) / self.logits_scaling


MODEL = GraniteForCausalLM

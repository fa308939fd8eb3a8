"""Granite 3: Llama with a factor at the embedding, at what each half of a layer adds, at attention, and at the head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.worker.layers import RotaryEmbedding
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaModel, complete_kv_heads


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    bias = config.attention_bias
    return LlamaAttention(config, name, rotary, qkv_bias=bias, output_bias=bias, scale=config.attention_multiplier)


class GraniteDecoderLayer(LlamaDecoderLayer):
    """What each half gives is scaled before it is added."""

    def __init__(self, config: Any, *modules: Any) -> None:
        super().__init__(config, *modules)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden) * self.residual_multiplier
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.feed_forward(hidden) * self.residual_multiplier, residual

    def feed_forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.mlp(hidden)
        return out


class GraniteForCausalLM(CausalLM):
    architectures = ("GraniteForCausalLM",)
    checkpoint_map = CheckpointMap(merged=MERGED)
    config_defaults = {
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
    complete_config = staticmethod(complete_kv_heads)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = LlamaModel(
            config,
            max_model_len,
            make_attention,
            layer_class=GraniteDecoderLayer,
            embedding_multiplier=config.embedding_multiplier,
        )
        super().__init__(model, head_of(config, model.embed_tokens))
        self.logits_scaling = config.logits_scaling

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) / self.logits_scaling


MODEL = GraniteForCausalLM

"""Ministral 3: Mistral with stretched positions, whose queries grow with their position as those of Llama 4 do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.worker.attention import Heads
from quire.worker.layers import QueryTemperature, RotaryEmbedding
from quire.worker.layers.rotary import rope_parameters
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, complete_heads
from quire.worker.models.mistral import refuse_layer_types

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3Attention(LlamaAttention):
    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        window = config.sliding_window or 0
        super().__init__(config, name, rotary, sliding_window=window)
        parameters = rope_parameters(config)
        beta = parameters.get("llama_4_scaling_beta") or 0.0
        num_positions = len(rotary.cos_sin_cache)
        period = parameters.get("original_max_position_embeddings") or num_positions
        # within the first period all queries are as they were
        self.temperature = QueryTemperature(beta, period, num_positions) if beta and num_positions > period else None

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        if self.temperature is None:
            return self.o_proj(self.attn(query, key, value, Heads(self.rotary, positions)))
        self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self.attn(self.temperature(positions, query), key, value))


def complete_config(config: Any) -> None:
    complete_heads(config)
    refuse_layer_types(config)
    if config.rope_scaling is None and config.rope_parameters is None:
        config.rope_parameters = dict(_ROPE)


class Ministral3ForCausalLM(LlamaLike):
    architectures = ("Ministral3ForCausalLM",)
    parts = Parts(Ministral3Attention)
    config_defaults = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(8),
        "head_dim": Nullable(128),
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_parameters": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = Ministral3ForCausalLM

"""Mistral 7B and its relatives: Llama with a sliding window over all layers, or none."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError
from quire.worker.layers import RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, complete_heads


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    return LlamaAttention(config, name, rotary, sliding_window=config.sliding_window or 0)


def complete_config(config: Any) -> None:
    complete_heads(config)
    refuse_layer_types(config)


def refuse_layer_types(config: Any) -> None:
    if getattr(config, "layer_types", None) is not None:
        raise ModelError(
            f"config.json: layer_types beside model_type={config.model_type} means windows that alternate, which is "
            "model_type=ministral. Correct model_type."
        )


class MistralForCausalLM(LlamaLike):
    architectures = ("MistralForCausalLM",)
    parts = Parts(make_attention)
    config_defaults = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(8),
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": Nullable(4096),
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = MistralForCausalLM

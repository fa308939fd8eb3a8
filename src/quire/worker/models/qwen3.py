"""Qwen 3: queries and keys are normalised head by head before their positions are turned in."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from quire.worker.layers import RMSNorm, RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts
from quire.worker.models.qwen2 import complete_windows, window_of_layer


def normed_attention(config: Any, name: str, rotary: nn.Module, window: int = 0) -> LlamaAttention:
    bias = getattr(config, "attention_bias", False)
    norm = partial(RMSNorm, eps=config.rms_norm_eps)
    return LlamaAttention(
        config, name, rotary, qkv_bias=bias, output_bias=bias, sliding_window=window, make_head_norm=norm
    )


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    return normed_attention(config, name, rotary, window_of_layer(config, index))


class Qwen3ForCausalLM(LlamaLike):
    architectures = ("Qwen3ForCausalLM",)
    parts = Parts(make_attention)
    config_defaults = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(32),
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": Nullable(4096),
        "max_window_layers": 28,
        "layer_types": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_windows)


MODEL = Qwen3ForCausalLM

"""Qwen 2 and 2.5: Llama with a bias on query, key and value, and sliding windows in some layers if asked for."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError
from quire.worker.layers import RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, complete_heads


def complete_windows(config: Any) -> None:
    """A window counts only with `use_sliding_window`, and then for the layers from `max_window_layers` on."""
    complete_heads(config)
    if not config.use_sliding_window:
        config.sliding_window = None
    if config.layer_types is None:
        first = config.num_hidden_layers if config.sliding_window is None else config.max_window_layers
        config.layer_types = [
            "sliding_attention" if index >= first else "full_attention" for index in range(config.num_hidden_layers)
        ]


def window_of_layer(config: Any, index: int) -> int:
    """0, or the sliding window of a layer; `layer_types` decides which layers have one."""
    kind = config.layer_types[index]
    if kind not in ("sliding_attention", "full_attention"):
        raise ModelError(
            f"config.json: layer_types[{index}]={str(kind)[:40]}: must be sliding_attention or full_attention here. "
            "Take the config.json that belongs to the weights."
        )
    return config.sliding_window or 0 if kind == "sliding_attention" else 0


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    window = window_of_layer(config, index)
    return LlamaAttention(config, name, rotary, qkv_bias=True, sliding_window=window)


class Qwen2ForCausalLM(LlamaLike):
    architectures = ("Qwen2ForCausalLM",)
    parts = Parts(make_attention)
    config_defaults = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(32),
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": Nullable(4096),
        "max_window_layers": 28,
        "layer_types": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_windows)


MODEL = Qwen2ForCausalLM

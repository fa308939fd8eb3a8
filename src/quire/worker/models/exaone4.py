"""EXAONE 4: norms behind each half, queries and keys normalised head by head; where some layers have a window, those
that see everything know no positions."""

from __future__ import annotations

from typing import Any

from quire.worker.layers import NoPositions, RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, PostNormDecoderLayer, complete_kv_heads
from quire.worker.models.qwen2 import window_of_layer
from quire.worker.models.qwen3 import normed_attention


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    window = window_of_layer(config, index)
    is_turned = window > 0 or config.sliding_window is None
    return normed_attention(config, name, rotary if is_turned else NoPositions(), window)


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    if config.layer_types is None:
        pattern = 4 if config.sliding_window_pattern is None else config.sliding_window_pattern
        # a text names the kinds of layers of a period, whose last one sees everything
        period = len(pattern) if isinstance(pattern, str) else pattern
        has_windows = config.sliding_window is not None and bool(period)
        config.layer_types = [
            "sliding_attention" if has_windows and (index + 1) % period else "full_attention"
            for index in range(config.num_hidden_layers)
        ]


class Exaone4ForCausalLM(LlamaLike):
    architectures = ("Exaone4ForCausalLM",)
    parts = Parts(make_attention, layer=PostNormDecoderLayer)
    config_defaults = {
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(32),
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": Nullable(4096),
        "sliding_window_pattern": None,
        "layer_types": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = Exaone4ForCausalLM

"""SmolLM 3: Llama, of which every fourth layer gives its queries and keys no positions."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError
from quire.worker.layers import NoPositions, RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, complete_kv_heads


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    bias = config.attention_bias
    is_windowed = config.layer_types[index] == "sliding_attention" and config.use_sliding_window
    return LlamaAttention(
        config,
        name,
        rotary if config.no_rope_layers[index] else NoPositions(),
        qkv_bias=bias,
        output_bias=bias,
        sliding_window=(config.sliding_window or 0) if is_windowed else 0,
    )


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    num_layers = config.num_hidden_layers
    if config.no_rope_layers is None:
        config.no_rope_layers = [int((index + 1) % config.no_rope_layer_interval != 0) for index in range(num_layers)]
    turns = config.no_rope_layers
    if not isinstance(turns, list) or len(turns) < num_layers:
        raise ModelError(
            f"config.json: no_rope_layers={str(turns)[:100]}: must have an entry for each of the {num_layers} layers. "
            "Take the config.json that belongs to the weights."
        )
    if config.layer_types is None:
        # a window, if there is one, stands where positions do not
        has_windows = config.use_sliding_window and config.sliding_window is not None
        config.layer_types = [
            "sliding_attention" if has_windows and not turns[index] else "full_attention" for index in range(num_layers)
        ]


class SmolLM3ForCausalLM(LlamaLike):
    architectures = ("SmolLM3ForCausalLM",)
    parts = Parts(make_attention)
    config_defaults = {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": Nullable(4),
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": Nullable(2_000_000.0),
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)


MODEL = SmolLM3ForCausalLM

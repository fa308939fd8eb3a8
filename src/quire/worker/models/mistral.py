"""Mistral 7B and its relatives: Llama with a sliding window over all layers, or none."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError
from quire.worker.layers import RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaModel, complete_heads


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    window = config.sliding_window or 0
    return LlamaAttention(config, name, rotary, qkv_bias=False, output_bias=False, sliding_window=window)


def refuse_layer_types(config: Any) -> None:
    if getattr(config, "layer_types", None) is not None:
        raise ModelError(
            f"config.json: layer_types beside model_type={config.model_type} means windows that alternate, which is "
            "model_type=ministral. Correct model_type."
        )


class MistralForCausalLM(CausalLM):
    architectures = ("MistralForCausalLM",)
    checkpoint_map = CheckpointMap(merged=MERGED)
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
    complete_config = staticmethod(complete_heads)

    def __init__(self, config: Any, max_model_len: int) -> None:
        refuse_layer_types(config)
        model = LlamaModel(config, max_model_len, make_attention)
        super().__init__(model, head_of(config, model.embed_tokens))


MODEL = MistralForCausalLM

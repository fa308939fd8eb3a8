"""Qwen 2 and 2.5: Llama with a bias on query, key and value, and sliding windows in some layers if asked for."""

from __future__ import annotations

from typing import Any

from quire.worker.layers import RotaryEmbedding
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaModel


def window_of_layer(config: Any, index: int) -> int:
    """0, or the sliding window of a layer; `layer_types` decides which layers have one."""
    return config.sliding_window or 0 if config.layer_types[index] == "sliding_attention" else 0


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    window = window_of_layer(config, index)
    return LlamaAttention(config, name, rotary, qkv_bias=True, output_bias=False, sliding_window=window)


class Qwen2ForCausalLM(CausalLM):
    architectures = ("Qwen2ForCausalLM",)
    checkpoint_map = CheckpointMap(merged=MERGED)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = LlamaModel(config, max_model_len, make_attention)
        super().__init__(model, head_of(config, model.embed_tokens))


MODEL = Qwen2ForCausalLM

"""Phi 1 and 2: attention and feed-forward layer side by side, a part of each head turned, and a bias on everything."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.worker.layers import LayerNorm, PlainMLP, RotaryEmbedding
from quire.worker.models.checkpoint_map import QKV, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaLike, ParallelDecoderLayer, Parts


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    norm = partial(LayerNorm, eps=config.layer_norm_eps) if config.qk_layernorm else None
    return LlamaAttention(config, name, rotary, qkv_bias=True, output_bias=True, make_head_norm=norm)


def make_mlp(config: Any, index: int) -> PlainMLP:
    return PlainMLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias=True)


def make_norm(config: Any) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_eps)


class PhiForCausalLM(LlamaLike):
    architectures = ("PhiForCausalLM",)
    parts = Parts(make_attention, make_mlp, make_norm, ParallelDecoderLayer)
    has_head_bias = True
    checkpoint_map = CheckpointMap(
        merged=QKV,
        modules={
            "dense": "o_proj",
            "fc1": "up_proj",
            "fc2": "down_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
            "final_layernorm": "norm",
        },
    )
    config_defaults = {
        "vocab_size": 51_200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    }


MODEL = PhiForCausalLM

"""MPT: ALiBi, norms without a bias, and no other biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.layers import LayerNorm, PlainMLP, alibi_slopes
from quire.worker.layers.plain_attention import PlainAttention
from quire.worker.models.checkpoint_map import QKV, CheckpointMap
from quire.worker.models.llama import LlamaLike, Parts

# What published models have; with another value the library that they come from computes something else.
_KNOWN = {
    "alibi": (True,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "clip_qkv": (None, 0),
    "attn_uses_sequence_id": (False,),
    "attn_type": ("multihead_attention",),
}


def make_attention(config: Any, index: int, name: str, rotary: Any) -> PlainAttention:
    num_heads = config.num_attention_heads
    slopes = alibi_slopes(num_heads, float(config.attn_config.get("alibi_bias_max", 8)))
    scale = config.attn_config.get("softmax_scale")
    return PlainAttention(config.hidden_size, num_heads, num_heads, name=name, bias=False, slopes=slopes, scale=scale)


def make_mlp(config: Any, index: int) -> PlainMLP:
    return PlainMLP(config.hidden_size, 4 * config.hidden_size, "gelu", bias=False)


def make_norm(config: Any) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_epsilon, bias=False)


def complete_config(config: Any) -> None:
    config.attn_config = config.attn_config or {}
    for name, known in _KNOWN.items():
        value = config.attn_config.get(name, known[0])
        if value not in known:
            raise ModelError(
                f"config.json: attn_config.{name}={value!r}: must be {known[0]!r}, as in the published models: another "
                "one is not built."
            )


def split_thirds(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Queries, keys and values are one tensor, one behind the other."""
    if ".Wqkv." not in name:
        return [(name, weight)]
    return [(name.replace("Wqkv", part), rows) for part, rows in zip(QKV, torch.chunk(weight, 3), strict=True)]


class MptForCausalLM(LlamaLike):
    architectures = ("MptForCausalLM", "MPTForCausalLM")
    parts = Parts(make_attention, make_mlp, make_norm, rotary=None)
    checkpoint_map = CheckpointMap(
        merged=QKV,
        modules={
            "wte": "embed_tokens",
            "blocks": "layers",
            "norm_1": "input_layernorm",
            "attn": "self_attn",
            "out_proj": "o_proj",
            "norm_2": "post_attention_layernorm",
            "ffn": "mlp",
            "norm_f": "norm",
        },
        prefixes={"transformer.": "model."},
        convert=split_thirds,
    )
    config_names = {"n_heads": "num_attention_heads", "d_model": "hidden_size", "n_layers": "num_hidden_layers"}
    config_defaults = {
        "vocab_size": 50_368,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "layer_norm_epsilon": 1e-5,
        "attn_config": None,
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)


MODEL = MptForCausalLM

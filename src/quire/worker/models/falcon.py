"""Falcon, old and new: attention and feed-forward layer side by side, few heads of keys, rotary positions or ALiBi."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from quire.errors import ModelError
from quire.worker.layers import NoPositions, PlainMLP, RotaryEmbedding, alibi_slopes
from quire.worker.layers.plain_attention import PlainAttention
from quire.worker.models.bloom import MODULES, PREFIXES, make_norm
from quire.worker.models.checkpoint_map import QKV, CheckpointMap, split_qkv
from quire.worker.models.llama import LlamaDecoderLayer, LlamaLike, ParallelDecoderLayer, Parts


class FalconAttention(PlainAttention):
    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding | NoPositions) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        slopes = None
        if config.alibi:
            # rounded, and scaled as the scores are: so they were published
            slopes = alibi_slopes(heads).bfloat16().float() * (size // heads) ** -0.5
        super().__init__(size, heads, num_kv_heads(config), name=name, bias=config.bias, slopes=slopes)
        self.rotary = rotary

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self.attn(query, key, value))


def make_mlp(config: Any, index: int) -> PlainMLP:
    return PlainMLP(config.hidden_size, config.ffn_hidden_size, config.activation, bias=config.bias)


def parts_of(config: Any) -> Parts:
    """The branches see the same hidden states, through one norm or one each; or one sees the other's output."""
    layer = partial(ParallelDecoderLayer, has_two_norms=has_two_norms(config))
    return Parts(
        FalconAttention,
        make_mlp,
        make_norm,
        layer if config.parallel_attn else LlamaDecoderLayer,
        rotary=None if config.alibi else RotaryEmbedding,
    )


def num_kv_heads(config: Any) -> int:
    """What the file says of their number counts in new models alone."""
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def has_two_norms(config: Any) -> bool:
    if config.new_decoder_architecture:
        return config.num_ln_in_parallel_attn in (None, 2)
    return not config.parallel_attn


def complete_config(config: Any) -> None:
    heads = config.num_attention_heads
    config.head_dim = config.hidden_size // heads
    if config.num_kv_heads is None:
        config.num_kv_heads = heads
    if config.ffn_hidden_size is None:
        config.ffn_hidden_size = 4 * config.hidden_size
    if config.new_decoder_architecture and not config.parallel_attn:
        raise ModelError(
            "config.json: parallel_attn=false, new_decoder_architecture=true: this kind of layer is always parallel. "
            "Take the config.json that belongs to the weights."
        )
    if config.num_kv_heads < 1 or heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={heads} is no multiple of num_kv_heads={config.num_kv_heads}. "
            "Take the config.json that belongs to the weights."
        )


class FalconForCausalLM(LlamaLike):
    architectures = ("FalconForCausalLM", "RWForCausalLM")
    config_names = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    config_defaults = {
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_kv_heads": None,
        "num_ln_in_parallel_attn": None,
        "layer_norm_epsilon": 1e-5,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len, parts=parts_of(config))
        self.checkpoint_map = CheckpointMap(
            merged=QKV,
            modules={**MODULES, "ln_attn": "input_layernorm", "ln_mlp": "mlp_layernorm"},
            prefixes=PREFIXES,
            convert=split_qkv(config.num_attention_heads, num_kv_heads(config)),
        )


MODEL = FalconForCausalLM

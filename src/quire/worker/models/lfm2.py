"""LFM 2: short convolutions with two gates, and attention in between.

b, c, x = in_proj(hidden)        out_proj(c * conv(b * x))
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.worker.layers import CausalConv, GatedMLP, ReplicatedLinear, RMSNorm, RotaryEmbedding
from quire.worker.layers.parameter import Part
from quire.worker.models.checkpoint_map import QKV, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, complete_kv_heads

LFM2_MERGED: dict[str, tuple[str, Part]] = {**QKV, "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1)}
LFM2_MODULES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w2": "down_proj",
    "embedding_norm": "norm",
    "out_proj": "o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
}


class ShortConv(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size = config.hidden_size
        self.in_proj = ReplicatedLinear(size, 3 * size, bias=config.conv_bias)
        self.conv = CausalConv(size, config.conv_L_cache, name=f"{name}.conv", bias=config.conv_bias)
        self.o_proj = ReplicatedLinear(size, size, bias=config.conv_bias)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        gate_in, gate_out, x = self.in_proj(hidden).chunk(3, dim=-1)
        return self.o_proj(gate_out * self.conv(gate_in * x))


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if config.layer_types[index] == "full_attention":
        return LlamaAttention(config, name, rotary, make_head_norm=partial(RMSNorm, eps=config.norm_eps))
    return ShortConv(config, name)


def make_mlp(config: Any, index: int) -> GatedMLP:
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if config.block_ffn_dim_multiplier is not None:
            inner = int(config.block_ffn_dim_multiplier * inner)
            inner = -(-inner // config.block_multiple_of) * config.block_multiple_of
    return GatedMLP(config.hidden_size, inner, "silu", bias=False)


def make_norm(config: Any) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps)


def place_convolution(name: str, weight: Any) -> list[tuple[str, Any]]:
    """It stands in the place of attention."""
    return [(name.replace(".conv.", ".self_attn.", 1), weight)]


def complete_config(config: Any) -> None:
    """As published, two keys have names of their own, which go before the common ones."""
    complete_kv_heads(config)
    if config.block_ff_dim is not None:
        config.intermediate_size = config.block_ff_dim
    if config.tie_embedding is not None:
        config.tie_word_embeddings = config.tie_embedding
    if config.layer_types is None:
        indices = range(config.num_hidden_layers)
        attention = indices if config.full_attn_idxs is None else config.full_attn_idxs
        config.layer_types = ["full_attention" if index in attention else "conv" for index in indices]


class Lfm2ForCausalLM(LlamaLike):
    architectures = ("Lfm2ForCausalLM",)
    parts = Parts(make_mixer, make_mlp, make_norm)
    checkpoint_map = CheckpointMap(
        merged=LFM2_MERGED, modules=LFM2_MODULES, convert=place_convolution, converts_quantized=True
    )
    config_defaults = {
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "block_ff_dim": None,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
        "layer_types": None,
        "tie_word_embeddings": True,
        "tie_embedding": None,
    }
    complete_config = staticmethod(complete_config)


MODEL = Lfm2ForCausalLM

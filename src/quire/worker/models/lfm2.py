"""LFM 2: short convolutions with two gates, and attention in between.

b, c, x = in_proj(hidden)        out_proj(c * conv(b * x))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.attention import Attention
from quire.worker.layers import (
    CausalConv,
    GatedActivation,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
)
from quire.worker.layers.parameter import Part
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.llama import MakeMLP, complete_kv_heads

LFM2_MERGED: dict[str, tuple[str, Part]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
}


class Lfm2Attention(nn.Module):
    def __init__(self, config: Any, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size, num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim = size // num_heads
        self.rotary = rotary
        self.qkv_proj = QKVParallelLinear(size, self.head_dim, num_heads, config.num_key_value_heads, bias=False)
        self.out_proj = RowParallelLinear(num_heads * self.head_dim, size, bias=False)
        self.q_layernorm = RMSNorm(self.head_dim, config.norm_eps)
        self.k_layernorm = RMSNorm(self.head_dim, config.norm_eps)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            name=f"{name}.attn",
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        query = self.q_layernorm(query.view(-1, self.attn.num_heads, self.head_dim)).flatten(1)
        key = self.k_layernorm(key.view(-1, self.attn.num_kv_heads, self.head_dim)).flatten(1)
        self.rotary(positions, query, key, self.head_dim)
        return self.out_proj(self.attn(query, key, value))


class Lfm2ShortConv(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size = config.hidden_size
        self.in_proj = ReplicatedLinear(size, 3 * size, bias=config.conv_bias)
        self.conv = CausalConv(size, config.conv_L_cache, name=name, bias=config.conv_bias)
        self.out_proj = ReplicatedLinear(size, size, bias=config.conv_bias)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        gate_in, gate_out, x = self.in_proj(hidden).chunk(3, dim=-1)
        return self.out_proj(gate_out * self.conv(gate_in * x))


class Lfm2MLP(nn.Module):
    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner, inner], bias=False)
        self.act = GatedActivation("silu")
        self.down_proj = RowParallelLinear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


def make_mlp(config: Any, index: int) -> Lfm2MLP:
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if config.block_ffn_dim_multiplier is not None:
            inner = int(config.block_ffn_dim_multiplier * inner)
            inner = -(-inner // config.block_multiple_of) * config.block_multiple_of
    return Lfm2MLP(config.hidden_size, inner)


class Lfm2DecoderLayer(nn.Module):
    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding, feed_forward: nn.Module) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        is_attention = config.layer_types[index] == "full_attention"
        if is_attention:
            self.self_attn = Lfm2Attention(config, f"{name}.self_attn", rotary)
        else:
            self.conv = Lfm2ShortConv(config, f"{name}.conv")
        self.mix = self.self_attn if is_attention else self.conv
        self.feed_forward = feed_forward
        self.operator_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`residual`: the sum of what the layers before gave; the last branch is still to be added."""
        if residual is None:
            hidden, residual = self.operator_norm(hidden), hidden
        else:
            hidden, residual = self.operator_norm(hidden, residual)
        hidden, residual = self.ffn_norm(self.mix(positions, hidden), residual)
        return self.feed_forward(hidden), residual


class Lfm2Model(nn.Module):
    def __init__(self, config: Any, max_model_len: int, make_mlp: MakeMLP = make_mlp) -> None:
        super().__init__()
        rotary = RotaryEmbedding.from_config(config, max_model_len)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Lfm2DecoderLayer(config, index, rotary, make_mlp(config, index))
            for index in range(config.num_hidden_layers)
        )
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.embedding_norm(hidden, residual)
        return hidden


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


class Lfm2ForCausalLM(CausalLM):
    architectures = ("Lfm2ForCausalLM",)
    checkpoint_map = CheckpointMap(merged=LFM2_MERGED, modules={"w2": "down_proj"})
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

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = Lfm2Model(config, max_model_len)
        super().__init__(model, head_of(config, model.embed_tokens))


MODEL = Lfm2ForCausalLM

"""The layers of T5, in its encoder and its decoder: positions are a bias of attention, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.messages import TEXT
from quire.worker.attention import Attention
from quire.worker.layers import (
    GatedMLP,
    PlainMLP,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabEmbedding,
    make_parameter,
)
from quire.worker.layers.cross_attention import CrossAttention
from quire.worker.layers.ranks import current_group
from quire.worker.layers.relative_bias import BiasOfAll

GATED = "gated-"


def feed_forward(config: Any) -> nn.Module:
    kind = config.feed_forward_proj
    if not kind.startswith(GATED):
        return PlainMLP(config.d_model, config.d_ff, kind, bias=False)
    name = kind.removeprefix(GATED)
    return GatedMLP(config.d_model, config.d_ff, "gelu_new" if name == "gelu" else name, bias=False)


class SelfAttention(nn.Module):
    """Of the tokens of one text. In an encoder all of them see each other."""

    def __init__(self, config: Any, bias_HR: Tensor, name: str, *, is_causal: bool) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.qkv_proj = QKVParallelLinear(config.d_model, config.d_kv, config.num_heads, config.num_heads, bias=False)
        self.o_proj = RowParallelLinear(inner, config.d_model, bias=False)
        num_heads = self.qkv_proj.num_heads
        self.bias = bias_HR
        self.attn: Attention | None = None
        if is_causal:
            self.attn = Attention(num_heads, num_heads, config.d_kv, 1.0, name=f"{name}.attn", bias=bias_HR, part=TEXT)

    def forward(self, hidden: Tensor, bias: BiasOfAll | None = None) -> Tensor:
        """`bias`: of all pairs of tokens, in an encoder."""
        query, key, value = self.qkv_proj(hidden)
        if self.attn is not None:
            return self.o_proj(self.attn(query, key, value))
        query_HTD, key_HTD, value_HTD = (
            part.unflatten(1, (self.qkv_proj.num_heads, -1)).transpose(0, 1) for part in (query, key, value)
        )
        assert bias is not None, "the tokens of an encoder see each other"
        seen = [
            F.scaled_dot_product_attention(query_HTD[:, rows], key_HTD, value_HTD, attn_mask=bias_HQT, scale=1.0)
            for rows, bias_HQT in bias.blocks()
        ]
        return self.o_proj(torch.cat(seen, dim=1).transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, config: Any, bias_HR: Tensor, name: str, *, is_causal: bool) -> None:
        super().__init__()
        size, eps = config.d_model, config.layer_norm_epsilon
        self.self_attn = SelfAttention(config, bias_HR, f"{name}.self_attn", is_causal=is_causal)
        self.self_attn_norm = RMSNorm(size, eps)
        self.cross_attn: CrossAttention | None = None
        if is_causal:
            self.cross_attn = CrossAttention(
                size,
                config.num_heads,
                config.d_kv,
                1.0,
                name=f"{name}.cross_attn",
                bias=False,
                heads_option="num_heads",
            )
            self.cross_attn_norm = RMSNorm(size, eps)
        self.mlp = feed_forward(config)
        self.mlp_norm = RMSNorm(size, eps)

    def forward(self, hidden: Tensor, bias: BiasOfAll | None = None) -> Tensor:
        hidden = hidden + self.self_attn(self.self_attn_norm(hidden), bias)
        if self.cross_attn is not None:
            hidden = hidden + self.cross_attn(self.cross_attn_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Stack(nn.Module):
    """The layers of the encoder, or of the decoder."""

    def __init__(self, config: Any, num_layers: int, name: str, *, is_causal: bool, shares_bias: bool) -> None:
        """`shares_bias`: all layers have that of the first one."""
        super().__init__()
        num_biases = 1 if shares_bias else num_layers
        biases = [_make_bias(config, is_causal=is_causal) for _ in range(num_biases)]
        self.layers = nn.ModuleList(
            Block(config, biases[index % num_biases], f"{name}.layers.{index}", is_causal=is_causal)
            for index in range(num_layers)
        )
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)


class Encoder(Stack):
    def forward(self, hidden: Tensor) -> Tensor:
        shared: BiasOfAll | None = None
        bias_HR: Tensor | None = None
        for layer in self.layers:
            if layer.self_attn.bias is not bias_HR:
                bias_HR = layer.self_attn.bias
                shared = BiasOfAll(bias_HR, len(hidden))
            hidden = layer(hidden, shared)
        return self.final_layer_norm(hidden)


class Decoder(Stack):
    """`scale`: of hidden states, before a head that has the embedding's weights."""

    def __init__(self, config: Any, *, scale: float, shares_bias: bool) -> None:
        super().__init__(config, config.num_decoder_layers, "model", is_causal=True, shares_bias=shares_bias)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.d_model)
        self.scale = scale

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.final_layer_norm(hidden)
        return hidden * self.scale if self.scale != 1.0 else hidden


def _make_bias(config: Any, *, is_causal: bool) -> nn.Parameter:
    group = current_group()
    num_heads = group.share_of(config.num_heads, "num_heads")
    num_distances = (1 if is_causal else 2) * config.relative_attention_max_distance + 1
    return make_parameter(num_heads, num_distances, pick=lambda whole, tensor, part: (whole, group.slice_of(tensor, 0)))

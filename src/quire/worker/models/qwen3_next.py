"""Qwen 3 Next: three layers of Gated DeltaNet for each layer of attention, and experts in place of feed-forward layers.

Gated DeltaNet keeps a matrix a head instead of keys and values:

    q, k, v, z, b, a = projections of hidden
    q, k, v          = silu(conv(q, k, v))
    out              = delta rule (q, k, v; decay = -exp(A) softplus(a + dt), strength = sigmoid(b))
    hidden           = out_proj(norm(out) * silu(z))

Longer than most: it has two kinds of layers, and heads that draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers import (
    CausalConv,
    GatedDeltaRule,
    GatedRMSNorm,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    activation,
)
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.llama import LlamaLike, MakeMLP, Parts, complete_kv_heads
from quire.worker.models.multi_token import MultiToken
from quire.worker.models.qwen2_moe import make_mlp

# What config.json may leave out, here and in Qwen 3.5.
DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": None,
    "tie_word_embeddings": False,
}


class Qwen3NextAttention(nn.Module):
    """Attention with a gate on its output; the projection of queries brings the gate, head by head."""

    def __init__(self, config: Any, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.rotary = rotary
        self.sigmoid = activation("sigmoid")
        sizes = [2 * num_heads * self.head_dim, num_kv_heads * self.head_dim, num_kv_heads * self.head_dim]
        self.qkv_proj = MergedColumnParallelLinear(config.hidden_size, sizes, bias=config.attention_bias)
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, is_zero_centred=True)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, is_zero_centred=True)
        # of this rank
        num_heads, num_kv_heads = self.qkv_proj.sizes[0] // (2 * self.head_dim), self.qkv_proj.sizes[1] // self.head_dim
        self.attn = Attention(num_heads, num_kv_heads, self.head_dim, self.head_dim**-0.5, name=f"{name}.attn")

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query_gate, key, value = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        query, gate = query_gate.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        query = self.q_norm(query).flatten(1)
        key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).flatten(1)
        self.rotary(positions, query, key, self.head_dim)
        out = self.attn(query, key, value)
        return self.o_proj(out * self.sigmoid(gate.flatten(1)))


class GatedDeltaNet(nn.Module):
    """The recurrent layer. Projections stand in the checkpoint head of keys by head of keys."""

    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        self.num_heads = config.linear_num_key_heads
        self.num_value_heads = config.linear_num_value_heads
        self.num_shared = self.num_value_heads // self.num_heads
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        keys, values = self.num_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.sizes = [keys, keys, values]
        channels = sum(self.sizes)
        self.make_projections(config.hidden_size, channels, values)
        self.conv1d = CausalConv(
            channels, config.linear_conv_kernel_dim, name=f"{name}.conv", bias=False, activation="silu"
        )
        self.rule = GatedDeltaRule(self.num_value_heads, self.key_dim, self.value_dim, name=f"{name}.rule")
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps, gates_first=False)
        self.out_proj = ReplicatedLinear(values, config.hidden_size, bias=False)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        mixed, z_TVE, b_TV, a_TV = self.projected(hidden)
        query, key, value = self.conv1d(mixed).split(self.sizes, dim=-1)
        out_TVE = self.rule(
            query.unflatten(-1, (self.num_heads, self.key_dim)),
            key.unflatten(-1, (self.num_heads, self.key_dim)),
            value.unflatten(-1, (self.num_value_heads, self.value_dim)),
            a_TV,
            b_TV,
        )
        return self.out_proj(self.norm(out_TVE, z_TVE).flatten(1))

    def make_projections(self, hidden_size: int, channels: int, values: int) -> None:
        self.in_proj_qkvz = ReplicatedLinear(hidden_size, channels + values, bias=False)
        self.in_proj_ba = ReplicatedLinear(hidden_size, 2 * self.num_value_heads, bias=False)

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[q | k | v] for the convolution, the gate z, and the numbers b and a of each head of values."""
        values = self.num_shared * self.value_dim
        qkvz_THF = self.in_proj_qkvz(hidden).unflatten(-1, (self.num_heads, -1))
        query, key, value, z = qkvz_THF.split([self.key_dim, self.key_dim, values, values], dim=-1)
        mixed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=-1)
        ba_THF = self.in_proj_ba(hidden).unflatten(-1, (self.num_heads, -1))
        b, a = ba_THF.chunk(2, dim=-1)
        return mixed, z.reshape(-1, self.num_value_heads, self.value_dim), b.flatten(1), a.flatten(1)


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if config.layer_types[index] == "full_attention":
        return Qwen3NextAttention(config, name, rotary)
    return GatedDeltaNet(config, name)


def make_norm(config: Any) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)


def complete_config(config: Any) -> None:
    complete_layers(config)
    config.mlp_only_layers = config.mlp_only_layers or []


def complete_layers(config: Any) -> None:
    complete_kv_heads(config)
    if config.layer_types is None:
        interval = config.full_attention_interval
        config.layer_types = [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(config.num_hidden_layers)
        ]
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads={config.linear_num_value_heads} is no multiple of "
            f"linear_num_key_heads={config.linear_num_key_heads}. Take the config.json that belongs to the weights."
        )


def multi_token_of(make_mlp: MakeMLP) -> MultiToken:
    """Here and in Qwen 3.5."""
    return MultiToken(
        lambda config, index, name, rotary: Qwen3NextAttention(config, name, rotary),
        make_mlp,
        prefix=lambda config: "mtp.",
        parts={
            "fc.": "fc.",
            "pre_fc_norm_embedding.": "embedding_norm.",
            "pre_fc_norm_hidden.": "hidden_norm.",
            "norm.": "norm.",
            "layers.": "layers.",
        },
        copies=("embed_tokens.", "lm_head."),
        make_norm=make_norm,
        feeds_normed=True,
    )


class Qwen3NextForCausalLM(LlamaLike):
    multi_token = multi_token_of(make_mlp)
    architectures = ("Qwen3NextForCausalLM",)
    parts = Parts(make_mixer, make_mlp, make_norm)
    checkpoint_map = CheckpointMap(
        modules={"linear_attn": "self_attn", "A_log": "rule.A_log", "dt_bias": "rule.dt_bias"},
        # the head that guesses several tokens is no part of the model (multi_token.py)
        ignored_modules=("mtp.",),
        merged={
            "q_proj": ("qkv_proj", 0),
            "k_proj": ("qkv_proj", 1),
            "v_proj": ("qkv_proj", 2),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", 1),
        },
    )
    config_defaults = {
        **DEFAULTS,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": None,
    }
    complete_config = staticmethod(complete_config)


MODEL = Qwen3NextForCausalLM

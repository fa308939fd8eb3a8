"""MiniMax: attention without a softmax in most layers, and experts behind each.

x      = norm(hidden)
hidden = a x + b attention(x)            a, b: two numbers for each kind of layer, and two for experts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import LinearAttention, ReplicatedLinear, RMSNorm, RotaryEmbedding, activation
from quire.worker.models.checkpoint_map import CheckpointMap, split_experts
from quire.worker.models.llama import LlamaDecoderLayer, LlamaLike, MakeNorm, Parts, complete_kv_heads
from quire.worker.models.mistral import make_attention
from quire.worker.models.mixtral import MODULES, PROJECTIONS, MixtralForCausalLM, make_mlp

_LINEAR, _FULL = "linear_attention", "full_attention"


class LightningAttention(nn.Module):
    """Queries, keys and values through an activation, and a gate and a norm on what comes out."""

    def __init__(self, config: Any, index: int, name: str) -> None:
        super().__init__()
        size, num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim or size // num_heads
        inner = num_heads * self.head_dim
        self.act = activation(config.hidden_act)
        self.sigmoid = activation("sigmoid")
        self.qkv_proj = ReplicatedLinear(size, 3 * inner, bias=False)
        self.output_gate = ReplicatedLinear(size, inner, bias=False)
        self.out_proj = ReplicatedLinear(inner, size, bias=False)
        self.norm = RMSNorm(inner)
        self.attn = LinearAttention(rates(index, config), self.head_dim, name=f"{name}.attn")

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv_THF = self.act(self.qkv_proj(hidden)).unflatten(-1, (-1, 3 * self.head_dim))
        query, key, value = qkv_THF.split(self.head_dim, dim=-1)
        out = self.norm(self.attn(query, key, value).flatten(1))
        return self.out_proj(self.sigmoid(self.output_gate(hidden)) * out)


def rates(index: int, config: Any) -> Tensor:
    """How fast each head forgets: later layers more slowly."""
    num_heads = config.num_attention_heads
    of_head = (2.0 ** (-8 / num_heads)) ** torch.arange(1, num_heads + 1, device="cpu", dtype=torch.float32)
    return of_head * (1 - index / (config.num_hidden_layers - 1 + 1e-5) + 1e-5)


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if config.layer_types[index] == _LINEAR:
        return LightningAttention(config, index, name)
    return make_attention(config, index, name, rotary)


class MiniMaxLayer(LlamaDecoderLayer):
    """What each half gives is added to the norm of what it was given, both scaled."""

    def __init__(self, config: Any, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm) -> None:
        super().__init__(config, attention, mlp, make_norm)
        if isinstance(attention, LightningAttention):
            self.scales = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        else:
            self.scales = config.full_attn_alpha_factor, config.full_attn_beta_factor
        self.mlp_scales = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        kept, added = self.scales
        hidden = self.input_layernorm(hidden if residual is None else hidden + residual)
        hidden = hidden * kept + self.self_attn(positions, hidden) * added
        kept, added = self.mlp_scales
        hidden = self.post_attention_layernorm(hidden)
        return self.mlp(hidden) * added, hidden * kept


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    if config.layer_types is None:
        config.layer_types = [_LINEAR if index % 2 else _FULL for index in range(config.num_hidden_layers)]
    unknown = set(config.layer_types) - {_LINEAR, _FULL}
    if unknown:
        raise ModelError(
            f"config.json: layer_types={sorted(unknown)}: must be {_LINEAR} or {_FULL}. Take the config.json that "
            "belongs to the weights."
        )


class MiniMaxForCausalLM(LlamaLike):
    architectures = ("MiniMaxForCausalLM",)
    parts = Parts(make_mixer, make_mlp, layer=MiniMaxLayer)
    checkpoint_map = CheckpointMap(
        modules=MODULES,
        merged=PROJECTIONS,
        # tables that follow from the number of a layer and a head
        ignored=(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay", ".rotary_emb.inv_freq"),
        convert=split_experts,
        converts_quantized=True,
    )
    config_defaults = {
        **MixtralForCausalLM.config_defaults,
        "layer_types": None,
        "linear_attn_alpha_factor": 1.0,
        "linear_attn_beta_factor": 1.0,
        "full_attn_alpha_factor": 1.0,
        "full_attn_beta_factor": 1.0,
        "mlp_alpha_factor": 1.0,
        "mlp_beta_factor": 1.0,
    }
    complete_config = staticmethod(complete_config)


MODEL = MiniMaxForCausalLM

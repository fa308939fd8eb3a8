"""Falcon H1: each layer has attention and Mamba 2 side by side, and many products with constants.

hidden = hidden + a attention(b norm(hidden)) + c mamba(d norm(hidden))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import GatedRMSNorm, ReplicatedLinear, RotaryEmbedding, activation
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaLike, LlamaMLP, Parts, complete_kv_heads
from quire.worker.models.mamba2_mixer import (
    FRAME_MODULES,
    HYBRID_DEFAULTS,
    SCAN_WEIGHTS,
    Mamba2Mixer,
    complete_mixers,
    mixer_sizes,
)


class SiluGate(nn.Module):
    """In the place of a norm with a gate: the gate alone."""

    def __init__(self) -> None:
        super().__init__()
        self.silu = activation("silu")

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * self.silu(gate)


class FalconH1Mixer(Mamba2Mixer):
    """Each part of the projection is scaled; the norm may be absent."""

    scales: Tensor

    def __init__(self, config: Any, name: str) -> None:
        sizes = mixer_sizes(config)
        super().__init__(sizes, name)
        inner = sizes.num_heads * sizes.head_dim
        self.out_proj = ReplicatedLinear(inner, sizes.hidden_size, bias=config.projectors_bias)
        self.norm: nn.Module = SiluGate()
        if config.mamba_rms_norm:
            gates_first = not config.mamba_norm_before_gate
            self.norm = GatedRMSNorm(inner, sizes.eps, gates_first=gates_first, num_groups=sizes.num_groups)
        lengths = [self.parts[0], *self.channels, self.parts[2]]
        scales = [torch.full((length,), scale) for length, scale in zip(lengths, config.ssm_multipliers, strict=True)]
        self.register_buffer("scales", torch.cat(scales), persistent=False)
        self.input_scale = config.ssm_in_multiplier

    def projected(self, hidden: Tensor) -> Tensor:
        return self.in_proj(hidden * self.input_scale) * self.scales


class FalconH1Attention(LlamaAttention):
    """Keys are scaled."""

    def __init__(self, config: Any, name: str, rotary: RotaryEmbedding) -> None:
        bias = config.attention_bias
        super().__init__(config, name, rotary, qkv_bias=bias, output_bias=bias)
        self.key_multiplier = config.key_multiplier

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        key = key * self.key_multiplier
        self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self.attn(query, key, value))


class SideBySide(nn.Module):
    """Both halves of a layer, with the same input."""

    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.mamba = FalconH1Mixer(config, f"{name}.mamba")
        self.attention = FalconH1Attention(config, f"{name}.attention", rotary)
        self.attention_in = config.attention_in_multiplier
        self.attention_out = config.attention_out_multiplier
        self.mamba_out = config.ssm_out_multiplier

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        recurrent = self.mamba(positions, hidden) * self.mamba_out
        return recurrent + self.attention(positions, hidden * self.attention_in) * self.attention_out


class FalconH1MLP(LlamaMLP):
    """Gate and output are scaled."""

    scales: Tensor

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, bias=config.mlp_bias)
        gate, self.output_scale = config.mlp_multipliers
        gate_size, up_size = self.gate_up_proj.sizes
        scales = torch.cat([torch.full((gate_size,), float(gate)), torch.ones(up_size)])
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x) * self.scales)) * self.output_scale


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    complete_mixers(config, config.mamba_d_ssm)
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        values = getattr(config, name) or [1.0] * count
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise ModelError(
                f"config.json: {name}={str(values)[:60]}: must be {count} numbers. Take the config.json that belongs "
                "to the weights."
            )
        setattr(config, name, values)


class FalconH1ForCausalLM(LlamaLike):
    architectures = ("FalconH1ForCausalLM",)
    parts = Parts(SideBySide, FalconH1MLP)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={
            "mamba": "self_attn.mamba",
            "self_attn": "self_attn.attention",
            **FRAME_MODULES,
            **SCAN_WEIGHTS,
        },
    )
    config_defaults = {
        **HYBRID_DEFAULTS,
        "max_position_embeddings": 8192,
        "projectors_bias": False,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": None,
        "ssm_multipliers": None,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len, embedding_multiplier=config.embedding_multiplier)
        self.logits_multiplier = config.lm_head_multiplier

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) * self.logits_multiplier


MODEL = FalconH1ForCausalLM

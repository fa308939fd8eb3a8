"""Qwen 3.5 without its eyes: the layers of Qwen 3 Next, whose projections stand apart, with dense feed-forward layers.

Positions of text are the same number in all three dimensions, so that plain rotary angles are those of its checkpoints.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.layers import ReplicatedLinear, RotaryEmbedding
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.llama import LlamaLike, LlamaMLP, Parts
from quire.worker.models.qwen3_next import (
    DEFAULTS,
    GatedDeltaNet,
    Qwen3NextAttention,
    Qwen3NextForCausalLM,
    complete_layers,
    make_norm,
    multi_token_of,
)


class Qwen35GatedDeltaNet(GatedDeltaNet):
    def make_projections(self, hidden_size: int, channels: int, values: int) -> None:
        self.in_proj_qkv = ReplicatedLinear(hidden_size, channels, bias=False)
        self.in_proj_z = ReplicatedLinear(hidden_size, values, bias=False)
        self.in_proj_b = ReplicatedLinear(hidden_size, self.num_value_heads, bias=False)
        self.in_proj_a = ReplicatedLinear(hidden_size, self.num_value_heads, bias=False)

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z_TVE = self.in_proj_z(hidden).unflatten(-1, (self.num_value_heads, self.value_dim))
        return self.in_proj_qkv(hidden), z_TVE, self.in_proj_b(hidden), self.in_proj_a(hidden)


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if config.layer_types[index] == "full_attention":
        return Qwen3NextAttention(config, name, rotary)
    return Qwen35GatedDeltaNet(config, name)


def make_mlp(config: Any, index: int) -> LlamaMLP:
    return LlamaMLP(config, bias=False)


class Qwen35TextForCausalLM(LlamaLike):
    multi_token = multi_token_of(make_mlp)
    architectures = ("Qwen3_5ForCausalLM",)
    parts = Parts(make_mixer, make_mlp, make_norm)
    checkpoint_map = CheckpointMap(
        modules=Qwen3NextForCausalLM.checkpoint_map.modules,
        ignored_modules=("mtp.", "model.visual."),
        merged=Qwen3NextForCausalLM.checkpoint_map.merged,
    )
    config_defaults = {
        **DEFAULTS,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    }
    complete_config = staticmethod(complete_layers)


MODEL = Qwen35TextForCausalLM

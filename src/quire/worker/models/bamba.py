"""Bamba: Mamba 2 in most layers and attention in a few, where half of each head turns with positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers import RotaryEmbedding
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaLike, Parts, complete_kv_heads, make_attention
from quire.worker.models.mamba2_mixer import (
    FRAME_MODULES,
    HYBRID_DEFAULTS,
    SCAN_WEIGHTS,
    Mamba2Mixer,
    complete_mixers,
    mixer_sizes,
)


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if config.layer_types[index] == "full_attention":
        return make_attention(config, index, name, rotary)
    return Mamba2Mixer(mixer_sizes(config), name)


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    complete_mixers(config)
    # as published, and not in the file
    config.partial_rotary_factor = 0.5
    attention = config.attn_layer_indices or ()
    config.layer_types = [
        "full_attention" if index in attention else "linear_attention" for index in range(config.num_hidden_layers)
    ]


class BambaForCausalLM(LlamaLike):
    architectures = ("BambaForCausalLM",)
    parts = Parts(make_mixer)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={"mamba": "self_attn", **FRAME_MODULES, **SCAN_WEIGHTS},
    )
    config_defaults = {
        **HYBRID_DEFAULTS,
        "max_position_embeddings": 262_144,
        "attn_layer_indices": None,
    }
    complete_config = staticmethod(complete_config)


MODEL = BambaForCausalLM

"""Mixtral: Mistral with a mixture of experts in place of each feed-forward layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers import Experts, Routing
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaLike, Parts, complete_kv_heads
from quire.worker.models.mistral import make_attention

# What the checkpoints of Mixtral, and of others after it, call otherwise.
MODULES = {"block_sparse_moe": "mlp", "w2": "down_proj"}
PROJECTIONS = {**MERGED, "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1)}


def make_mlp(config: Any, index: int) -> nn.Module:
    routing = Routing(config.num_experts_per_tok)
    return Experts(config.hidden_size, config.intermediate_size, config.num_local_experts, routing, config.hidden_act)


class MixtralForCausalLM(LlamaLike):
    architectures = ("MixtralForCausalLM",)
    parts = Parts(make_attention, make_mlp)
    checkpoint_map = CheckpointMap(modules=MODULES, merged=PROJECTIONS)
    config_defaults = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_kv_heads)


MODEL = MixtralForCausalLM

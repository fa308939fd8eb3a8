"""MiniMax M2: Mixtral with OLMo 2's norms over all queries and all keys, and experts chosen as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers import Experts, Routing
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.llama import LlamaLike, Parts, complete_kv_heads
from quire.worker.models.mixtral import MODULES, PROJECTIONS
from quire.worker.models.olmo2 import Olmo2Attention


def make_mlp(config: Any, index: int) -> nn.Module:
    return Experts(
        config.hidden_size,
        config.intermediate_size,
        config.num_local_experts,
        Routing(config.num_experts_per_tok, is_sigmoid=True),
        config.hidden_act,
        has_correction=True,
    )


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    # as it was published: how many numbers of a head turn
    if config.rotary_dim is not None and getattr(config, "partial_rotary_factor", None) is None:
        config.partial_rotary_factor = config.rotary_dim / config.head_dim


class MiniMaxM2ForCausalLM(LlamaLike):
    architectures = ("MiniMaxM2ForCausalLM",)
    parts = Parts(Olmo2Attention, make_mlp)
    checkpoint_map = CheckpointMap(
        modules={**MODULES, "e_score_correction_bias": "gate.e_score_correction_bias"}, merged=PROJECTIONS
    )
    config_names = {"num_experts": "num_local_experts"}
    config_defaults = {
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 196_608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "rotary_dim": None,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = MiniMaxM2ForCausalLM

"""Jamba: Mamba in most layers, attention without positions in a few, and experts in every second one."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.errors import ModelError
from quire.worker.layers import Experts, RMSNorm, RotaryEmbedding, Routing
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_experts
from quire.worker.models.llama import LlamaAttention, LlamaLike, LlamaMLP, Parts, complete_kv_heads
from quire.worker.models.mamba import MambaMixer, MambaSizes, place_bias, rank_of
from quire.worker.models.mamba2_mixer import FRAME_MODULES, SCAN_WEIGHTS


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if index % config.attn_layer_period == config.attn_layer_offset:
        return LlamaAttention(config, name, rotary)
    sizes = MambaSizes(
        hidden_size=config.hidden_size,
        inner=config.mamba_expand * config.hidden_size,
        state_size=config.mamba_d_state,
        rank=config.mamba_dt_rank,
        kernel_size=config.mamba_d_conv,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
    )
    mixer = MambaMixer(sizes, name)
    mixer.dt_layernorm = RMSNorm(sizes.rank, config.rms_norm_eps)
    mixer.b_layernorm = RMSNorm(sizes.state_size, config.rms_norm_eps)
    mixer.c_layernorm = RMSNorm(sizes.state_size, config.rms_norm_eps)
    return mixer


def make_mlp(config: Any, index: int) -> nn.Module:
    if config.num_experts == 1 or index % config.expert_layer_period != config.expert_layer_offset:
        return LlamaMLP(config, bias=False)
    routing = Routing(config.num_experts_per_tok, is_normalised=False)
    return Experts(config.hidden_size, config.intermediate_size, config.num_experts, routing, config.hidden_act)


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    config.mamba_dt_rank = rank_of(config, "mamba_dt_rank")
    for kind in ("attn", "expert"):
        period = getattr(config, f"{kind}_layer_period")
        offset = getattr(config, f"{kind}_layer_offset")
        if not 0 <= offset < period:
            raise ModelError(
                f"config.json: {kind}_layer_offset={offset}, {kind}_layer_period={period}: the first must be below the "
                "second. Take the config.json that belongs to the weights."
            )
    if config.hidden_act != "silu":
        raise ModelError(
            f"config.json: hidden_act={config.hidden_act!r}: must be silu, the one that recurrent layers have. Take "
            "the config.json that belongs to the weights."
        )


def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
    return [part for split, piece in split_experts(name, weight) for part in place_bias(split, piece)]


class JambaForCausalLM(LlamaLike):
    architectures = ("JambaForCausalLM",)
    parts = Parts(make_mixer, make_mlp, rotary=None)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={
            "mamba": "self_attn",
            "router": "gate",
            **FRAME_MODULES,
            **SCAN_WEIGHTS,
        },
        convert=convert,
        converts_quantized=True,
    )
    config_defaults = {
        "vocab_size": 65_536,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": None,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = JambaForCausalLM

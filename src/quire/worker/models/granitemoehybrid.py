"""Granite 4: Mamba 2 in most layers and attention in a few, each followed by experts, a shared layer, or both.

hidden = hidden + m mix(norm(hidden))        mix: Mamba 2 or attention; m: residual_multiplier
hidden = hidden + m (experts(norm(hidden)) + shared_mlp(norm(hidden)))
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import Experts, RotaryEmbedding, Routing
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_experts
from quire.worker.models.granite import GraniteDecoderLayer, GraniteForCausalLM, make_attention
from quire.worker.models.llama import LlamaMLP, Parts, complete_kv_heads
from quire.worker.models.mamba2_mixer import (
    MIXER_DEFAULTS,
    SCAN_WEIGHTS,
    Mamba2Mixer,
    complete_mixers,
    mixer_sizes,
)

# as published, and as Transformers writes them today
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_PROJECTIONS = {"input_linear.weight": "gate_up_proj", "output_linear.weight": "down_proj"}
_EXPERTS = re.compile(
    r"(.*)\.block_sparse_moe\.(?:experts\.)?(input_linear\.weight|output_linear\.weight|gate_up_proj|down_proj)"
)
_SHARED = re.compile(r"(.*)\.shared_mlp\.(input_linear|output_linear)\.weight")
_ROUTER = re.compile(r"(.*)\.block_sparse_moe\.router(\.layer)?\.weight")


def make_mixer(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> nn.Module:
    if config.layer_types[index] == "full_attention":
        return make_attention(config, index, name, rotary)
    return Mamba2Mixer(mixer_sizes(config), name)


def make_mlp(config: Any, index: int) -> nn.Module:
    shared = LlamaMLP(config, bias=False, inner_size=config.shared_intermediate_size)
    if not config.num_local_experts:
        return shared
    return Experts(
        config.hidden_size,
        config.intermediate_size,
        config.num_local_experts,
        Routing(config.num_experts_per_tok),
        config.hidden_act,
        shared=shared,
    )


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    kinds = config.layer_types or ["linear_attention"] * config.num_hidden_layers
    config.layer_types = [_KINDS.get(kind, kind) for kind in kinds]
    unknown = set(config.layer_types) - set(_KINDS.values())
    if unknown:
        raise ModelError(
            f"config.json: layer_types={sorted(unknown)}: must be mamba or attention, which is all that this model's "
            "layers can be. Take the config.json that belongs to the weights."
        )
    if config.position_embedding_type not in (None, "nope", "rope"):
        raise ModelError(
            f"config.json: position_embedding_type={config.position_embedding_type!r}: must be rope, nope or null. "
            "Take the config.json that belongs to the weights."
        )
    if "linear_attention" in config.layer_types:
        complete_mixers(config)


def split_merged(shared_module: str, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Gate and up are one tensor, and so are all experts of a layer. `shared_module`: where the shared layer is."""
    if router := _ROUTER.fullmatch(name):
        return [(f"{router[1]}.mlp.gate.weight", weight)]
    if experts := _EXPERTS.fullmatch(name):
        return split_experts(f"{experts[1]}.mlp.experts.{_PROJECTIONS.get(experts[2], experts[2])}", weight)
    shared = _SHARED.fullmatch(name)
    if shared is None:
        return [(name, weight)]
    layer, kind = shared.groups()
    parts = {"down_proj": weight}
    if kind == "input_linear":
        parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=0), strict=True))
    return [(f"{layer}.{shared_module}.{part}.weight", matrix) for part, matrix in parts.items()]


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    architectures = ("GraniteMoeHybridForCausalLM",)
    config_names = {"layers_block_type": "layer_types"}
    config_defaults = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "position_embedding_type": None,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": None,
        **MIXER_DEFAULTS,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        has_positions = config.position_embedding_type == "rope"
        parts = Parts(
            make_mixer, make_mlp, layer=GraniteDecoderLayer, rotary=RotaryEmbedding if has_positions else None
        )
        super().__init__(config, max_model_len, parts=parts)
        shared_module = "mlp.shared_expert" if config.num_local_experts else "mlp"
        self.checkpoint_map = CheckpointMap(
            merged=MERGED,
            modules={"mamba": "self_attn", **SCAN_WEIGHTS},
            convert=partial(split_merged, shared_module),
        )


MODEL = GraniteMoeHybridForCausalLM

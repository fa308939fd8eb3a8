"""Granite 4: Mamba 2 in most layers and attention in a few, each followed by experts, a shared layer, or both.

hidden = hidden + m mix(norm(hidden))        mix: Mamba 2 or attention; m: residual_multiplier
hidden = hidden + m (experts(norm(hidden)) + shared_mlp(norm(hidden)))
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import Experts, NoPositions, RotaryEmbedding, Routing, VocabEmbedding
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_experts
from quire.worker.models.granite import GraniteDecoderLayer
from quire.worker.models.llama import LlamaAttention, LlamaMLP, complete_kv_heads, make_norm
from quire.worker.models.mamba2_mixer import (
    MIXER_DEFAULTS,
    SCAN_WEIGHTS,
    Mamba2Mixer,
    complete_mixers,
    complete_time_step_limit,
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


def make_positions(config: Any, max_model_len: int) -> nn.Module:
    if config.position_embedding_type == "rope":
        return RotaryEmbedding.from_config(config, max_model_len)
    return NoPositions()


def make_mixer(config: Any, index: int, positions: nn.Module) -> nn.Module:
    name = f"model.layers.{index}.self_attn"
    if config.layer_types[index] == "full_attention":
        bias = config.attention_bias
        return LlamaAttention(
            config, name, positions, qkv_bias=bias, output_bias=bias, scale=config.attention_multiplier
        )
    return Mamba2Mixer(mixer_sizes(config), name)


class GraniteMoeHybridLayer(GraniteDecoderLayer):
    def __init__(self, config: Any, index: int, positions: nn.Module) -> None:
        shared = LlamaMLP(config, bias=False, inner_size=config.shared_intermediate_size)
        super().__init__(config, make_mixer(config, index, positions), shared)
        self.experts = make_experts(config) if config.num_local_experts else None

    def feed_forward(self, hidden: Tensor) -> Tensor:
        out = super().feed_forward(hidden)
        return out if self.experts is None else self.experts(hidden) + out


def make_experts(config: Any) -> Experts:
    return Experts(
        config.hidden_size,
        config.intermediate_size,
        config.num_local_experts,
        Routing(config.num_experts_per_tok),
        config.hidden_act,
    )


class GraniteMoeHybridModel(nn.Module):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        positions = make_positions(config, max_model_len)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            GraniteMoeHybridLayer(config, index, positions) for index in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)
        self.embedding_multiplier = config.embedding_multiplier

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        hidden = hidden * self.embedding_multiplier
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    complete_time_step_limit(config)
    config.time_step_limit = tuple(config.time_step_limit)
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


def split_merged(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Gate and up are one tensor, and so are all experts of a layer."""
    if router := _ROUTER.fullmatch(name):
        return [(f"{router[1]}.experts.gate.weight", weight)]
    if experts := _EXPERTS.fullmatch(name):
        return split_experts(f"{experts[1]}.experts.experts.{_PROJECTIONS.get(experts[2], experts[2])}", weight)
    shared = _SHARED.fullmatch(name)
    if shared is None:
        return [(name, weight)]
    layer, kind = shared.groups()
    parts = {"down_proj": weight}
    if kind == "input_linear":
        parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=0), strict=True))
    return [(f"{layer}.mlp.{part}.weight", matrix) for part, matrix in parts.items()]


class GraniteMoeHybridForCausalLM(CausalLM):
    architectures = ("GraniteMoeHybridForCausalLM",)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={"mamba": "self_attn", **SCAN_WEIGHTS},
        convert=split_merged,
    )
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
        model = GraniteMoeHybridModel(config, max_model_len)
        super().__init__(model, head_of(config, model.embed_tokens))
        self.logits_scaling = config.logits_scaling

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) / self.logits_scaling


MODEL = GraniteMoeHybridForCausalLM

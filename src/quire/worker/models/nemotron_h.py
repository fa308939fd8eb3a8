"""Nemotron H: layers of one kind each, which are Mamba 2, attention without positions, a feed-forward layer or experts.

hidden = hidden + mixer(norm(hidden))
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker import kernels
from quire.worker.layers import (
    Experts,
    NoPositions,
    PlainMLP,
    ReplicatedLinear,
    RMSNorm,
    Routing,
)
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import QKV, CheckpointMap, split_experts
from quire.worker.models.llama import LlamaAttention, complete_kv_heads
from quire.worker.models.mamba2 import MambaModel
from quire.worker.models.mamba2_mixer import SCAN_WEIGHTS, Mamba2Mixer, MixerSizes, check_groups

# in a pattern, as published at first, and as Transformers writes them today
_KINDS = {
    "M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe",
    "mamba": "linear_attention", "attention": "full_attention",
}  # fmt: skip
_MOST_LAYERS = 10_000


def make_mlp(config: Any, inner: int) -> PlainMLP:
    return PlainMLP(config.hidden_size, inner, config.mlp_hidden_act, bias=config.mlp_bias)


class NemotronExperts(Experts):
    """Experts may compute in a narrower space than the one that they are chosen in."""

    def __init__(self, config: Any) -> None:
        width = config.moe_latent_size
        super().__init__(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            Routing(
                config.num_experts_per_tok,
                is_sigmoid=True,
                is_normalised=config.norm_topk_prob,
                num_groups=config.n_group,
                top_groups=config.topk_group,
                scale=config.routed_scaling_factor,
            ),
            config.mlp_hidden_act,
            has_correction=True,
            shared=make_mlp(config, config.moe_shared_expert_intermediate_size),
            has_gate=False,
            expert_width=width,
        )
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if width is not None:
            self.fc1_latent_proj = ReplicatedLinear(config.hidden_size, width, bias=config.mlp_bias)
            self.fc2_latent_proj = ReplicatedLinear(width, config.hidden_size, bias=config.mlp_bias)

    def _routed(self, x: Tensor) -> Tensor:
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return super()._routed(x)
        weights, ids = self._route(x)
        out = kernels.weigh_experts(self._outputs(self.fc1_latent_proj(x), ids), weights)
        return self.fc2_latent_proj(out if self.group.size == 1 else self.group.all_reduce(out))


class NemotronBlock(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        name, kind = f"model.layers.{index}.mixer", config.layer_types[index]
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.has_positions = kind in ("linear_attention", "full_attention")
        self.mixer = make_mixer(config, kind, name)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        return hidden + (self.mixer(positions, x) if self.has_positions else self.mixer(x))


def make_mixer(config: Any, kind: str, name: str) -> nn.Module:
    if kind == "full_attention":
        bias = config.attention_bias
        return LlamaAttention(config, name, NoPositions(), qkv_bias=bias, output_bias=bias)
    if kind == "mlp":
        return make_mlp(config, config.intermediate_size)
    if kind == "moe":
        return NemotronExperts(config)
    sizes = MixerSizes(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        num_groups=config.n_groups,
        state_size=config.ssm_state_size,
        kernel_size=config.conv_kernel,
        eps=config.layer_norm_epsilon,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        time_step_limit=(config.time_step_min, math.inf),
    )
    return Mamba2Mixer(sizes, name)


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    check_groups(config.mamba_num_heads, config.n_groups, "mamba_num_heads, n_groups")
    kinds = config.layer_types or config.hybrid_override_pattern or ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(kinds, str | list) or len(kinds) > _MOST_LAYERS:
        raise ModelError(
            f"config.json: layers_block_type={str(kinds)[:40]}: must be the kinds of at most {_MOST_LAYERS:,} layers. "
            "Take the config.json that belongs to the weights."
        )
    config.layer_types = [_KINDS.get(kind, kind) for kind in kinds]
    # what a file says of their number beside their kinds does not count
    config.num_hidden_layers = len(config.layer_types)
    unknown = sorted({str(kind) for kind in config.layer_types} - set(_KINDS.values()))
    if unknown:
        raise ModelError(
            f"config.json: layers_block_type={str(unknown)[:80]}: must be mamba, attention, mlp or moe, which is all "
            "that this model's layers can be. Take the config.json that belongs to the weights."
        )
    for name, value in (("mamba_hidden_act", "silu"), ("sliding_window", None)):
        if getattr(config, name) != value:
            raise ModelError(
                f"config.json: {name}={getattr(config, name)!r}: must be {value!r}, as in every published model of "
                "this kind: another one is not built."
            )


class NemotronHForCausalLM(CausalLM):
    architectures = ("NemotronHForCausalLM",)
    checkpoint_map = CheckpointMap(
        merged=QKV,
        prefixes={"backbone.": "model."},
        modules={"shared_experts": "shared_expert", **SCAN_WEIGHTS},
        ignored_modules=("mtp.",),
        convert=split_experts,
        converts_quantized=True,
    )
    config_names = {"layers_block_type": "layer_types"}
    config_defaults = {
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": None, "layer_types": None,
        "hybrid_override_pattern": None,
        "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "sliding_window": None, "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
        "time_step_min": 0.001, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "norm_topk_prob": True, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    }  # fmt: skip
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        layers = (NemotronBlock(config, index) for index in range(config.num_hidden_layers))
        model = MambaModel(config, layers, sums_in_float32=False)
        super().__init__(model, head_of(config, model.embeddings))


MODEL = NemotronHForCausalLM

"""DeepSeek V2: latent attention, and experts of which a token asks few, beside shared ones that it always asks.

Longer than most: latent attention is written out here, and V3 builds on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers import (
    ColumnParallelLinear,
    Experts,
    LatentProjection,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    Routing,
    RowParallelLinear,
    latent_parts,
)
from quire.worker.layers.rotary import rope_parameters, yarn_magnitude
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaLike, LlamaMLP, Parts


class LatentAttention(nn.Module):
    """Queries meet latent vectors: what is kept of a token is one of these and one rotary part of all heads' keys.

    key     [normed latent vector, rotary part]       value = its first kv_lora_rank numbers
    query   [what `kv_b_proj` makes of a head's query, its rotary part]
    """

    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size, has_bias = config.hidden_size, config.attention_bias
        self.latent_dim, self.rotary_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.plain_dim = config.qk_nope_head_dim
        query_dim = self.plain_dim + self.rotary_dim
        self.rotary = rotary
        self.q_a_proj: ReplicatedLinear | None = None
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(size, config.num_attention_heads * query_dim, bias=False)
        else:
            self.q_a_proj = ReplicatedLinear(size, config.q_lora_rank, bias=has_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(config.q_lora_rank, config.num_attention_heads * query_dim, bias=False)
        self.kv_a_proj_with_mqa = ReplicatedLinear(size, self.latent_dim + self.rotary_dim, bias=has_bias)
        self.kv_a_layernorm = RMSNorm(self.latent_dim)
        self.kv_b_proj = LatentProjection(
            self.latent_dim, config.num_attention_heads, self.plain_dim, config.v_head_dim
        )
        self.num_heads = self.kv_b_proj.num_heads
        self.o_proj = RowParallelLinear(config.num_attention_heads * config.v_head_dim, size, bias=has_bias)
        self.attn = Attention(
            self.num_heads,
            1,
            self.latent_dim + self.rotary_dim,
            _scale(config, query_dim),
            name=f"{name}.attn",
            value_dim=self.latent_dim,
            values_in_keys=True,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query_THD = self._query(hidden).view(-1, self.num_heads, self.plain_dim + self.rotary_dim)
        plain_THD, turned_THR = query_THD.split([self.plain_dim, self.rotary_dim], dim=-1)
        latent_TL, key_TR = self.kv_a_proj_with_mqa(hidden).split([self.latent_dim, self.rotary_dim], dim=-1)
        self.rotary(positions, turned_THR, key_TR, self.rotary_dim)
        key = torch.cat((self.kv_a_layernorm(latent_TL), key_TR), dim=-1)
        query = torch.cat((self.kv_b_proj.to_latent(plain_THD), turned_THR), dim=-1)
        latent_THL = self.attn(query, key).view(-1, self.num_heads, self.latent_dim)
        values: Tensor = self.kv_b_proj.to_values(latent_THL)
        return self.o_proj(values.view(values.shape[0], -1))

    def _query(self, hidden: Tensor) -> Tensor:
        if self.q_a_proj is None:
            return self.q_proj(hidden)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))


def _scale(config: Any, query_dim: int) -> float:
    """What scores are multiplied by; where YaRN leaves its magnitude to the scores, it counts for query and key."""
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not weight:
        return float(query_dim**-0.5)
    return float(query_dim**-0.5 * yarn_magnitude(parameters.get("factor", 1.0), weight) ** 2)


def complete_latent(config: Any) -> None:
    """The head that rotary positions turn is the rotary part of one."""
    config.head_dim = config.qk_rope_head_dim


def experts_or_dense(
    config: Any, index: int, routing: Routing, *, has_correction: bool = False, bias: bool = False
) -> nn.Module:
    """The first layers are dense, the others have experts. `bias` is that of dense layers and of shared experts."""
    if index < config.first_k_dense_replace:
        return LlamaMLP(config, bias=bias)
    shared: LlamaMLP | None = None
    if config.n_shared_experts:
        inner_size = config.moe_intermediate_size * config.n_shared_experts
        shared = LlamaMLP(config, bias=bias, inner_size=inner_size)
    return Experts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
        routing,
        config.hidden_act,
        has_correction=has_correction,
        shared=shared,
    )


def refuse_other_values(config: Any, **known: tuple[Any, ...]) -> None:
    """Keys of which only some values are built."""
    for key, values in known.items():
        found = getattr(config, key, values[0])
        if found not in values:
            allowed = " or ".join(str(value) for value in values)
            raise ModelError(
                f"config.json: {key}={found!r}: must be {allowed}, another way of choosing experts is not built. "
                "Try model_impl=transformers."
            )


def complete_config(config: Any) -> None:
    complete_latent(config)
    refuse_other_values(
        config,
        topk_method=("greedy", "group_limited_greedy"),
        scoring_func=("softmax",),
        norm_topk_prob=(False, None),
        moe_layer_freq=(1,),
    )


def make_mlp(config: Any, index: int) -> nn.Module:
    num_groups, top_groups = config.n_group, config.topk_group
    if config.topk_method == "greedy":
        num_groups = top_groups = 1
    routing = Routing(
        config.num_experts_per_tok,
        is_normalised=False,
        num_groups=num_groups,
        top_groups=top_groups,
        scale=config.routed_scaling_factor,
    )
    return experts_or_dense(config, index, routing, bias=config.mlp_bias)


def latent_map(config: Any, ignored_modules: tuple[str, ...] = ()) -> CheckpointMap:
    return CheckpointMap(
        merged={name: MERGED[name] for name in ("gate_proj", "up_proj")},
        modules={"shared_experts": "shared_expert"},
        ignored_modules=ignored_modules,
        convert=latent_parts(config.qk_nope_head_dim, config.v_head_dim),
        converts_quantized=True,
    )


LATENT_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": Nullable(1536),
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


class DeepseekV2ForCausalLM(LlamaLike):
    architectures = ("DeepseekV2ForCausalLM",)
    parts = Parts(LatentAttention, make_mlp, is_interleaved=True)
    config_defaults = {
        **LATENT_DEFAULTS,
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": Nullable(2),
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "num_experts_per_tok": None,
        "mlp_bias": False,
        "routed_scaling_factor": 1.0,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.checkpoint_map = latent_map(config)


MODEL = DeepseekV2ForCausalLM

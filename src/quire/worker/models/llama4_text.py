"""Llama 4, its text: most layers see their own chunk of the text alone, and one expert computes a token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker import kernels
from quire.worker.attention import Attention
from quire.worker.layers import (
    Experts,
    PlainNorm,
    QKVParallelLinear,
    QueryTemperature,
    RotaryEmbedding,
    Routing,
    RowParallelLinear,
)
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_experts
from quire.worker.models.llama import LlamaLike, LlamaMLP, Parts, complete_heads


class TurnedHeads(nn.Module):
    """Positions as rotary angles; then, in some models, heads of one length."""

    def __init__(self, config: Any, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary
        self.head_dim = config.head_dim
        self.norm = PlainNorm(config.head_dim, config.rms_norm_eps) if config.use_qk_norm else None

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        self.rotary(positions, query, key, self.head_dim)
        if self.norm is None:
            return query, key
        heads = (x.view(x.shape[0], -1, self.head_dim) for x in (query, key))
        query, key = (self.norm(x) for x in heads)
        return query, key


class TemperedQueries(nn.Module):
    """No angles: queries grow with their position."""

    def __init__(self, config: Any, num_positions: int) -> None:
        super().__init__()
        attn_scale = config.attn_scale if config.attn_temperature_tuning else 0.0
        self.temperature = QueryTemperature(attn_scale, config.floor_scale, num_positions, first=1)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.temperature(positions, query), key


class Llama4Attention(nn.Module):
    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(size, head_dim, num_heads, num_kv_heads, bias=bias)
        self.o_proj = RowParallelLinear(num_heads * head_dim, size, bias=bias)
        self.positions: nn.Module = TurnedHeads(config, rotary)
        if not config.no_rope_layers[index]:
            self.positions = TemperedQueries(config, len(rotary.cos_sin_cache))
        is_chunked = config.layer_types[index] == "chunked_attention"
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            head_dim**-0.5,
            name=f"{name}.attn",
            sliding_window=config.attention_chunk_size if is_chunked else 0,
            is_chunked=is_chunked,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        query, key = self.positions(positions, query, key)
        return self.o_proj(self.attn(query, key, value))


class Llama4Experts(Experts):
    """One expert a token, and its weight is that of what goes in."""

    def _routed(self, x: Tensor) -> Tensor:
        weights, ids = self._route(x)
        out = self._outputs(kernels.weigh_experts(x.unsqueeze(1), weights), ids).squeeze(1)
        return out if self.group.size == 1 else self.group.all_reduce(out)


def make_mlp(config: Any, index: int) -> nn.Module:
    if index not in config.moe_layers:
        return LlamaMLP(config, bias=False, inner_size=config.intermediate_size_mlp)
    return Llama4Experts(
        config.hidden_size,
        config.intermediate_size,
        config.num_local_experts,
        Routing(config.num_experts_per_tok, is_sigmoid=True, is_normalised=False),
        config.hidden_act,
        shared=LlamaMLP(config, bias=False),
    )


def complete_config(config: Any) -> None:
    """Which layers have angles, chunks and experts."""
    complete_heads(config)
    if config.num_experts_per_tok != 1:
        raise ModelError(
            f"config.json: num_experts_per_tok={config.num_experts_per_tok}: must be 1, as in every Llama 4: more "
            "experts with weighed inputs are not built."
        )
    layers = range(config.num_hidden_layers)
    if not config.no_rope_layers:
        interval = config.no_rope_layer_interval
        config.no_rope_layers = [int((index + 1) % interval != 0) for index in layers]
    if config.moe_layers is None:
        step = config.interleave_moe_layer_step
        config.moe_layers = list(range(step - 1, config.num_hidden_layers, step))
    if config.layer_types is None:
        has_chunks = config.attention_chunk_size is not None
        config.layer_types = [
            "chunked_attention" if turns and has_chunks else "full_attention" for turns in config.no_rope_layers
        ]
    unknown = set(config.layer_types) - {"chunked_attention", "full_attention"}
    if unknown:
        raise ModelError(f"config.json: layer_types={sorted(unknown)}: must be chunked_attention or full_attention.")
    if len(config.no_rope_layers) < len(layers):
        raise ModelError(
            f"config.json: no_rope_layers names {len(config.no_rope_layers)} layers, num_hidden_layers is "
            f"{config.num_hidden_layers}. "
            "Take the config.json that belongs to the weights."
        )


def turned_experts(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Checkpoints hold all experts of a layer in one tensor, [experts, inputs, outputs]."""
    return split_experts(name, weight.transpose(1, 2) if weight.ndim == 3 else weight)


class Llama4ForCausalLM(LlamaLike):
    architectures = ("Llama4ForCausalLM",)
    parts = Parts(Llama4Attention, make_mlp, is_interleaved=True)
    checkpoint_map = CheckpointMap(
        merged=MERGED, modules={"feed_forward": "mlp", "router": "gate"}, convert=turned_experts
    )
    config_defaults = {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": Nullable(8),
        "head_dim": Nullable(128),
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": Nullable(8192),
        "layer_types": None,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attention_bias": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = Llama4ForCausalLM

"""MiMo V2 Flash: layers with a window have more heads of keys, sinks and other angles than those that see everything;
values are smaller than keys, and experts are chosen as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.attention import Attention, Heads
from quire.worker.layers import Experts, QKVParallelLinear, RotaryEmbedding, RowParallelLinear
from quire.worker.layers.rotary import parameters_by_kind
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.deepseek_v2 import refuse_other_values
from quire.worker.models.deepseek_v3 import routing_of
from quire.worker.models.gpt_oss import make_sinks
from quire.worker.models.hy_v3 import complete_mlp_types, is_dense
from quire.worker.models.llama import LlamaLike, LlamaMLP, Parts
from quire.worker.models.multi_token import MultiToken
from quire.worker.models.qwen2 import window_of_layer

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PERIOD = 6
_TURNING = 0.334
# by kind of layer: how a file names the base of its angles, and what it is where it does not
_THETAS = {_FULL: ("rope_theta", 5_000_000.0), _SLIDING: ("swa_rope_theta", 10_000.0)}


class MimoAttention(nn.Module):
    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        window = window_of_layer(config, index)
        num_heads, size = config.num_attention_heads, config.hidden_size
        kind = config.layer_types[index]
        self.rotary = rotary
        self.value_scale = 1.0 if config.attention_value_scale is None else config.attention_value_scale
        self.qkv_proj = QKVParallelLinear(
            size,
            config.head_dim,
            num_heads,
            config.num_key_value_heads * (2 if kind == _SLIDING else 1),
            bias=config.attention_bias,
            value_dim=config.v_head_dim,
        )
        self.o_proj = RowParallelLinear(num_heads * config.v_head_dim, size, bias=False)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5,
            name=f"{name}.attn",
            sliding_window=window,
            value_dim=config.v_head_dim,
            sinks=make_sinks(self.qkv_proj) if kind == _SLIDING else None,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        return self.o_proj(self.attn(query, key, value * self.value_scale, Heads(self.rotary, positions)))


def make_mlp(config: Any, index: int) -> nn.Module:
    if is_dense(config, index):
        return LlamaMLP(config, bias=False)
    return Experts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
        routing_of(config),
        config.hidden_act,
        has_correction=True,
    )


def complete_config(config: Any) -> None:
    if config.layer_types is None:
        # the first one sees everything, and every sixth
        config.layer_types = [
            _SLIDING if index and (index + 1) % _PERIOD else _FULL for index in range(config.num_hidden_layers)
        ]
    complete_mlp_types(config)
    if config.routed_scaling_factor is None:
        config.routed_scaling_factor = 1.0
    if config.sliding_window_size is not None:
        # as it was published: so many tokens before the one that looks
        config.sliding_window = config.sliding_window_size + 1
    thetas = {kind: getattr(config, name, None) or theta for kind, (name, theta) in _THETAS.items()}
    turning = {"partial_rotary_factor": getattr(config, "partial_rotary_factor", None) or _TURNING}
    by_kind = parameters_by_kind(config, thetas, _FULL)
    config.rope_parameters = {kind: {**turning, **of_kind} for kind, of_kind in by_kind.items()}
    refuse_other_values(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",))


def _first_with_window(config: Any) -> int:
    kinds: list[str] = config.layer_types
    return kinds.index(_SLIDING) if _SLIDING in kinds else 0


class MiMoV2FlashForCausalLM(LlamaLike):
    architectures = ("MiMoV2FlashForCausalLM",)
    parts = Parts(MimoAttention, make_mlp)
    # The first of three: its attention has a window, and it has no experts.
    multi_token = MultiToken(
        MimoAttention,
        lambda config, index: LlamaMLP(config, bias=False),
        prefix=lambda config: "model.mtp.layers.0.",
        parts={
            "enorm.": "embedding_norm.",
            "hnorm.": "hidden_norm.",
            "eh_proj.": "fc.",
            "final_layernorm.": "norm.",
            "pre_mlp_layernorm.": "layers.0.post_attention_layernorm.",
            "": "layers.0.",
        },
        feeds_normed=True,
        like_layer=_first_with_window,
    )
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={"attention_sink_bias": "attn.sinks"},
        # what only drafts (multi_token.py)
        ignored_modules=("model.mtp.",),
    )
    config_names = {"num_local_experts": "n_routed_experts"}
    config_defaults = {
        "vocab_size": 152_576,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": None,
        "attention_bias": False,
        "attention_value_scale": Nullable(0.707),
        "sliding_window": 129,
        "sliding_window_size": None,
        "layer_types": None,
        "mlp_layer_types": None,
        "n_routed_experts": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": Nullable(1.0),
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = MiMoV2FlashForCausalLM

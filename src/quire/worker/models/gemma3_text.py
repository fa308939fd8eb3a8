"""Gemma 3, its text: most layers look through a window, and turn by other angles than those that see everything.

h = h + norm(attention(norm(h)))
h = h + norm(mlp(norm(h)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import (
    GatedActivation,
    MergedColumnParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from quire.worker.layers.rotary import parameters_by_kind, rotary_of_layers
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, complete_heads
from quire.worker.models.qwen2 import window_of_layer

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6
_THETAS = {_SLIDING: ("rope_local_base_freq", 10_000.0), _FULL: ("rope_theta", 1_000_000.0)}


def _make_norm(config: Any, size: int | None = None) -> RMSNorm:
    return RMSNorm(size or config.hidden_size, config.rms_norm_eps, is_zero_centred=True)


class Gemma3Attention(LlamaAttention):
    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__(
            config,
            name,
            rotary,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            sliding_window=window_of_layer(config, index),
            scale=config.query_pre_attn_scalar**-0.5,
        )
        self.q_norm = _make_norm(config, self.head_dim)
        self.k_norm = _make_norm(config, self.head_dim)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        query = self.q_norm(query.view(-1, self.attn.num_heads, self.head_dim)).flatten(1)
        key = self.k_norm(key.view(-1, self.attn.num_kv_heads, self.head_dim)).flatten(1)
        self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self.attn(query, key, value))


class Gemma3MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(size, [inner, inner], bias=False)
        self.act = GatedActivation(config.hidden_activation)
        self.down_proj = RowParallelLinear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Gemma3Layer(nn.Module):
    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = Gemma3Attention(config, index, f"model.layers.{index}.self_attn", rotary)
        self.mlp = Gemma3MLP(config)
        self.input_layernorm = _make_norm(config)
        self.post_attention_layernorm = _make_norm(config)
        self.pre_feedforward_layernorm = _make_norm(config)
        self.post_feedforward_layernorm = _make_norm(config)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        attended = self.post_attention_layernorm(self.self_attn(positions, self.input_layernorm(hidden)))
        hidden, residual = self.pre_feedforward_layernorm(attended, hidden)
        return residual + self.post_feedforward_layernorm(self.mlp(hidden))


class Gemma3Model(nn.Module):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens = VocabEmbedding(config.vocab_size, size)
        # of a row of embeddings, rounded as the model's type rounds it
        self.register_buffer("embed_scale", torch.full((size,), size**0.5), persistent=False)
        rotary = rotary_of_layers(config, max_model_len)
        self.layers = nn.ModuleList(
            Gemma3Layer(config, index, rotary[index]) for index in range(config.num_hidden_layers)
        )
        self.norm = _make_norm(config)

    def embed(self, input_ids: Tensor) -> Tensor:
        scaled: Tensor = self.embed_tokens(input_ids) * self.embed_scale
        return scaled

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed(input_ids) if input_embeds is None else input_embeds
        for layer in self.layers:
            hidden = layer(positions, hidden)
        normed: Tensor = self.norm(hidden)
        return normed


def complete_config(config: Any) -> None:
    complete_heads(config)
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(
            "config.json: use_bidirectional_attention=true: tokens of text that look ahead make a model of embeddings, "
            "which is not served. Take a checkpoint that generates text."
        )
    if config.layer_types is None:
        pattern = getattr(config, "sliding_window_pattern", None) or _PATTERN
        config.layer_types = [_SLIDING if (index + 1) % pattern else _FULL for index in range(config.num_hidden_layers)]
    for index in range(config.num_hidden_layers):
        window_of_layer(config, index)
    config.rope_parameters = _rope_parameters(config)


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    thetas = {kind: getattr(config, name, None) or theta for kind, (name, theta) in _THETAS.items()}
    return parameters_by_kind(config, thetas, _FULL)


class Gemma3ForCausalLM(CausalLM):
    architectures = ("Gemma3ForCausalLM",)
    checkpoint_map = CheckpointMap(merged=MERGED)
    config_defaults = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": Nullable(4096),
        "layer_types": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = Gemma3Model(config, max_model_len)
        super().__init__(model, head_of(config, model.embed_tokens))
        self.soft_cap = config.final_logit_softcapping
        self._tanh = activation("tanh")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        return logits if self.soft_cap is None else self._tanh(logits / self.soft_cap) * self.soft_cap


MODEL = Gemma3ForCausalLM

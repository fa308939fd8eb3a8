"""Gemma 3, its text: most layers look through a window, and turn by other angles than those that see everything.

h = h + norm(attention(norm(h)))
h = h + norm(mlp(norm(h)))
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import RMSNorm, RotaryEmbedding, activation
from quire.worker.layers.rotary import parameters_by_kind
from quire.worker.model_config import Nullable
from quire.worker.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaLike,
    LlamaModel,
    MakeNorm,
    Parts,
    complete_heads,
    make_centred_norm,
    make_plain_mlp,
    norm_of_sum,
)
from quire.worker.models.qwen2 import window_of_layer

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6
_THETAS = {_SLIDING: ("rope_local_base_freq", 10_000.0), _FULL: ("rope_theta", 1_000_000.0)}


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    return LlamaAttention(
        config,
        name,
        rotary,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        sliding_window=window_of_layer(config, index),
        scale=config.query_pre_attn_scalar**-0.5,
        make_head_norm=partial(RMSNorm, eps=config.rms_norm_eps, is_zero_centred=True),
    )


class Gemma3Layer(LlamaDecoderLayer):
    """Each half has a norm before it and one behind it."""

    def __init__(self, config: Any, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm) -> None:
        super().__init__(config, attention, mlp, make_norm)
        self.pre_feedforward_layernorm = make_norm(config)
        self.post_feedforward_layernorm = make_norm(config)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = norm_of_sum(self.input_layernorm, hidden, residual)
        attended = self.post_attention_layernorm(self.self_attn(positions, hidden))
        hidden, residual = self.pre_feedforward_layernorm(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3Model(LlamaModel):
    def __init__(self, config: Any, *arguments: Any, **further: Any) -> None:
        super().__init__(config, *arguments, **further)
        size = config.hidden_size
        # of a row of embeddings, rounded as the model's type rounds it
        self.register_buffer("embed_scale", torch.full((size,), size**0.5), persistent=False)

    def embed(self, input_ids: Tensor) -> Tensor:
        scaled: Tensor = super().embed(input_ids) * self.embed_scale
        return scaled


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


class Gemma3ForCausalLM(LlamaLike):
    architectures: tuple[str, ...] = ("Gemma3ForCausalLM",)
    parts = Parts(make_attention, make_plain_mlp, make_centred_norm, Gemma3Layer, Gemma3Model)
    config_names = {"hidden_activation": "hidden_act"}
    config_defaults: dict[str, Any] = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
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
        super().__init__(config, max_model_len)
        self.soft_cap = config.final_logit_softcapping
        self._tanh = activation("tanh")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        return logits if self.soft_cap is None else self._tanh(logits / self.soft_cap) * self.soft_cap


MODEL = Gemma3ForCausalLM

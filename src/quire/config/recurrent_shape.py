"""Recurrent layers in numbers: what their matrices have and what a sequence keeps in them, from config.json alone.

A kind of model says what one recurrent layer has, and under which common names the rest of it can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.config.shape_numbers import count_of, size_of

_ATTENTION = ("attention", "full_attention")
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class _Layer:
    """One recurrent layer. States are float32, whatever the model's type is."""

    num_linear_parameters: int
    # convolutions and decays, which stay floats
    num_float_parameters: int
    # numbers that each of its states has
    state_sizes: tuple[int, ...]


@dataclass(frozen=True)
class RecurrentShape:
    """The layers of a model that keep a state."""

    num_layers: int
    layer: _Layer
    # layers of attention bring a gate with their queries, as large as these
    has_output_gate: bool = False
    # there is one behind each layer
    has_feed_forward: bool = True

    @classmethod
    def of(cls, config: dict[str, Any], num_layers: int) -> RecurrentShape | None:
        """None: a model of another kind."""
        kind = config.get("model_type")
        if kind not in _LAYERS:
            return None
        return cls(
            num_layers=num_layers - _num_attention_layers(config, num_layers),
            layer=_LAYERS[kind](config),
            has_output_gate=kind in _GATED_ATTENTION,
            has_feed_forward=kind != "mamba2",
        )

    @property
    def num_linear_parameters(self) -> int:
        return self.num_layers * self.layer.num_linear_parameters

    @property
    def num_float_parameters(self) -> int:
        return self.num_layers * self.layer.num_float_parameters

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Of a sequence, each state of each layer."""
        return tuple(_FLOAT_BYTES * size for size in self.layer.state_sizes) * self.num_layers


def with_common_names(config: dict[str, Any]) -> dict[str, Any]:
    """What such a model calls otherwise than a decoder of plain attention does."""
    rename = _NAMES.get(str(config.get("model_type")))
    return {**config, **rename(config)} if rename is not None else config


def _num_attention_layers(config: dict[str, Any], num_layers: int) -> int:
    if config["model_type"] == "mamba2":
        return 0
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        return sum(kind in _ATTENTION for kind in kinds[:num_layers])
    if config["model_type"] in _GATED_ATTENTION:
        return num_layers // size_of(config, "full_attention_interval", default=4)
    if config["model_type"] == "lfm2":
        indices = config.get("full_attn_idxs")
        return len(indices) if isinstance(indices, list) else num_layers
    return 0


# ---- kinds of layers


def _short_conv(config: dict[str, Any]) -> _Layer:
    size = size_of(config, "hidden_size")
    window = size * size_of(config, "conv_L_cache", default=3)
    return _Layer(4 * size * size, window, (window,))


def _gated_delta(config: dict[str, Any]) -> _Layer:
    size = size_of(config, "hidden_size")
    num_keys = size_of(config, "linear_num_key_heads", default=16)
    num_values = size_of(config, "linear_num_value_heads", default=32)
    key_dim = size_of(config, "linear_key_head_dim", default=128)
    value_dim = size_of(config, "linear_value_head_dim", default=128)
    values = num_values * value_dim
    channels = 2 * num_keys * key_dim + values
    window = channels * size_of(config, "linear_conv_kernel_dim", default=4)
    return _Layer(
        size * (channels + values + 2 * num_values) + values * size,
        window + 2 * num_values + value_dim,
        (window, num_values * key_dim * value_dim),
    )


def _state_space(config: dict[str, Any], num_heads: int, head_dim: int, names: tuple[str, str, str]) -> _Layer:
    """`names`: of groups, of the size of a state, and of the width of the convolution."""
    size = size_of(config, "hidden_size")
    groups, state_size, width = (size_of(config, name) for name in names)
    inner = num_heads * head_dim
    channels = inner + 2 * groups * state_size
    return _Layer(
        size * (inner + channels + num_heads) + inner * size,
        # with a bias each
        channels * (width + 1) + 3 * num_heads + inner,
        (channels * width, inner * state_size),
    )


def _mamba2(config: dict[str, Any]) -> _Layer:
    heads, head_dim = size_of(config, "num_heads"), size_of(config, "head_dim")
    return _state_space(config, heads, head_dim, ("n_groups", "state_size", "conv_kernel"))


def _granite(config: dict[str, Any]) -> _Layer:
    heads = size_of(config, "mamba_n_heads")
    inner = size_of(config, "mamba_expand", default=2) * size_of(config, "hidden_size")
    return _state_space(config, heads, inner // heads, ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"))


# ---- names


def _names_of_lfm2(config: dict[str, Any]) -> dict[str, Any]:
    inner = size_of(config, "block_ff_dim", "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        multiplier = config.get("block_ffn_dim_multiplier", 1.0)
        if multiplier is not None:
            unit = size_of(config, "block_multiple_of", default=256)
            inner = -(-int(multiplier * inner) // unit) * unit
    is_tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return {"intermediate_size": inner, "tie_word_embeddings": is_tied}


def _names_of_granite(config: dict[str, Any]) -> dict[str, Any]:
    shared = size_of(config, "shared_intermediate_size")
    has_experts = count_of(config, "num_local_experts") > 0
    return {"shared_expert_intermediate_size": shared} if has_experts else {"intermediate_size": shared}


def _names_of_mamba2(config: dict[str, Any]) -> dict[str, Any]:
    is_tied = config.get("tie_word_embeddings", False)
    return {"num_attention_heads": size_of(config, "num_heads"), "tie_word_embeddings": is_tied}


_GATED_ATTENTION = ("qwen3_next", "qwen3_5_text")
_LAYERS: dict[Any, Callable[[dict[str, Any]], _Layer]] = {
    "lfm2": _short_conv,
    "mamba2": _mamba2,
    "granitemoehybrid": _granite,
    **dict.fromkeys(_GATED_ATTENTION, _gated_delta),
}
RECURRENT_MODEL_TYPES = tuple(_LAYERS)
_NAMES = {"lfm2": _names_of_lfm2, "mamba2": _names_of_mamba2, "granitemoehybrid": _names_of_granite}

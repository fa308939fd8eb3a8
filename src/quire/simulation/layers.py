"""What each layer of a model keeps, from config.json alone: what a worker would report after it has built the model."""

from __future__ import annotations

import math
from typing import Any

from quire.config.arithmetic import FLOAT_BYTES, SCALE_BYTES, ModelShape
from quire.messages import LayerSpec
from quire.state_layout import STATE_HEADER_BYTES

_STATE_ALIGNMENT = 16


def layer_specs(shape: ModelShape, kv_dtype: str, hf_config: dict[str, Any]) -> list[LayerSpec]:
    """Of the model, or of the part of it that a worker has."""
    size = FLOAT_BYTES.get(kv_dtype, 1)
    scales = 0 if kv_dtype in FLOAT_BYTES else 2 * SCALE_BYTES
    if shape.mixed is not None:
        return [
            LayerSpec(
                name=f"attention {number}",
                num_kv_heads=layer.num_kv_heads,
                key_dim=layer.head_dim,
                value_dim=layer.head_dim,
                bytes_per_element=size,
                scale_bytes=scales,
                sliding_window=layer.window,
            )
            for number, layer in enumerate(shape.mixed.layers)
            if layer.source is None
        ]
    is_chunked = bool((hf_config.get("text_config") or hf_config).get("attention_chunk_size"))
    # latent vectors are keys of one head, and values are a part of them
    heads, key_dim, value_dim = shape.num_kv_heads, shape.head_dim, shape.head_dim
    if shape.latent is not None:
        heads, key_dim, value_dim, scales = 1, shape.latent.kept_values, 0, scales // 2
    attention = [
        LayerSpec(
            name=f"attention {number}",
            num_kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            bytes_per_element=size,
            scale_bytes=scales,
            sliding_window=shape.window if number < shape.num_windowed_layers else 0,
            is_chunked=is_chunked and number < shape.num_windowed_layers,
        )
        for number in range(shape.num_attention_layers)
    ]
    return [*attention, *_state_specs(shape)]


def _state_specs(shape: ModelShape) -> list[LayerSpec]:
    states = () if shape.recurrent is None else shape.recurrent.state_bytes
    return [
        LayerSpec(
            name=f"state {number}",
            num_kv_heads=0,
            key_dim=0,
            value_dim=0,
            bytes_per_element=0,
            state_bytes=STATE_HEADER_BYTES + math.ceil(num_bytes / _STATE_ALIGNMENT) * _STATE_ALIGNMENT,
        )
        for number, num_bytes in enumerate(states)
    ]

"""Tiny Eagle heads with random weights, named and shaped as published ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_STD = 0.25


def make_eagle_head(
    path: Path, target: Path, *, num_layers: int = 1, seed: int = 0, weights: dict[str, Tensor] | None = None
) -> Path:
    """First generation: no norms but one a layer, neither embedding nor head. `weights` replace random ones."""
    config = _config_of(target)
    size = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size)}
    for index in range(num_layers):
        shapes |= _layer(config, f"layers.{index}", size)
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (size,)
    changes = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": num_layers}
    return _write(path, {**config, **changes}, {**_random(shapes, seed), **(weights or {})})


def make_eagle3_head(
    path: Path, target: Path, *, draft_vocab_size: int = 48, seed: int = 0, weights: dict[str, Tensor] | None = None
) -> Path:
    """Third generation: one layer over embedding and state, norms, a head over every few tokens of the target."""
    config = _config_of(target)
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    shapes = {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab_size, size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        **_layer(config, "midlayer", 2 * size),
    }
    of_target = torch.arange(draft_vocab_size) * (vocab_size // draft_vocab_size)
    tables = {
        "d2t": of_target - torch.arange(draft_vocab_size),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, of_target, True),
    }
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
    }
    return _write(path, {**config, **changes}, {**_random(shapes, seed), **tables, **(weights or {})})


def _layer(config: dict[str, Any], name: str, input_size: int) -> dict[str, tuple[int, ...]]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        f"{name}.self_attn.q_proj.weight": (heads, input_size),
        f"{name}.self_attn.k_proj.weight": (kv_heads, input_size),
        f"{name}.self_attn.v_proj.weight": (kv_heads, input_size),
        f"{name}.self_attn.o_proj.weight": (size, heads),
        f"{name}.mlp.gate_proj.weight": (inner, size),
        f"{name}.mlp.up_proj.weight": (inner, size),
        f"{name}.mlp.down_proj.weight": (size, inner),
        f"{name}.post_attention_layernorm.weight": (size,),
    }


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * _STD
        for name, shape in shapes.items()
    }


def _config_of(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
    return {**config, "model_type": "llama"}


def _write(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return path

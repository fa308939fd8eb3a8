"""Tiny checkpoints with a head that guesses the token behind the next one, named as published ones are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_STD = 0.25
# model_type -> beginning of the head's names, of its layer's, and the names of its other parts
_NAMES = {
    "deepseek_v3": ("model.layers.{num_layers}.", "", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen3_next": ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}
_NAMES["hy_v3"] = ("model.layers.{num_layers}.", "", ("enorm", "hnorm", "eh_proj", "final_layernorm"))
_NAMES["mimo_v2_flash"] = ("model.mtp.layers.0.", "", ("enorm", "hnorm", "eh_proj", "final_layernorm"))
# without a norm of its own
_NAMES["ernie4_5_moe"] = ("model.mtp_", "block.0.", ("emb_norm.0", "hidden_norm.0", "linear_proj.0", ""))
# layers of the model whose attention and whose feed-forward layer its own are like, where not the last one
_LIKE = {"mimo_v2_flash": (1, 0), "ernie4_5_moe": (1, 0)}
_RENAMED = {"mimo_v2_flash": ("post_attention_layernorm", "pre_mlp_layernorm")}
_NAMES["glm4_moe"] = _NAMES["deepseek_v3"]
_NAMES["qwen3_5_text"] = _NAMES["qwen3_5_moe_text"] = _NAMES["qwen3_next"]


def add_mtp_head(path: Path, *, seed: int = 0, weights: dict[str, Tensor] | None = None) -> Path:
    """Its layer is like one of the model that has attention, with other numbers. `weights`: by the names "fc" and those
    of a layer, in the place of random ones."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(path / "model.safetensors")
    # those lie behind the layers, with norms whose numbers begin with 1
    kind = config["model_type"]
    has_copies = kind in ("deepseek_v3", "glm4_moe")
    num_layers, size = config["num_hidden_layers"], config["hidden_size"]
    prefix, of_layer, (embedding_norm, hidden_norm, fc, norm) = _NAMES[config["model_type"]]
    prefix = prefix.format(num_layers=num_layers)
    generator = torch.Generator().manual_seed(seed)
    attention, mlp = _LIKE.get(kind, (num_layers - 1, num_layers - 1))
    before, after = _RENAMED.get(kind, ("", ""))
    head: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        like = f"model.layers.{mlp if '.mlp.' in name else attention}."
        if name.startswith(like):
            noise = torch.randn(tensor.shape, generator=generator) * _STD
            own = name.removeprefix(like).replace(before, after) if before else name.removeprefix(like)
            head[f"{prefix}{of_layer}{own}"] = tensor if tensor.ndim == 1 else noise
    for part in filter(None, (embedding_norm, hidden_norm, norm)):
        # the numbers of a norm that has done nothing yet
        head[f"{prefix}{part}.weight"] = tensors["model.norm.weight"] * 0 + (not kind.startswith("qwen3"))
    head[f"{prefix}{fc}.weight"] = torch.randn((size, 2 * size), generator=generator) * _STD
    if has_copies:
        # copies, as published
        head[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        head[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name, tensor in (weights or {}).items():
        found = f"{prefix}{fc}.weight" if name == "fc" else f"{prefix}{of_layer}{name}"
        assert head[found].shape == tensor.shape, found
        head[found] = tensor
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in {**tensors, **head}.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path

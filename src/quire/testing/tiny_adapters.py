"""Adapters for tiny checkpoints: directories as PEFT writes them, and the model that one of them makes if merged."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_STD = 0.3


def make_adapter(
    path: Path,
    checkpoint: Path,
    *,
    seed: int,
    rank: int = 8,
    alpha: float = 8.0,
    targets: Sequence[str] = TARGETS,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Random matrices, so wide that the adapter changes nearly every token. `config` is for adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    ranks = config.get("rank_pattern", {})
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        target = module.rpartition(".")[2]
        if target not in targets or not name.endswith(".weight"):
            continue
        # GPT-2 stores [in, out]
        outputs, inputs = reversed(weight.shape) if config.get("fan_in_fan_out") else weight.shape
        own = ranks.get(target, rank)
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(own, inputs, generator=generator).to(dtype) / math.sqrt(inputs)
        tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, own, generator=generator) * _STD).to(dtype)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), **config}
    write_adapter(path, values, tensors)
    return path


def write_adapter(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")


def merged_checkpoint(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with weight + scale * B A in the place of each weight, worked out here by hand."""
    shutil.copytree(checkpoint, path)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
        target = module.rpartition(".")[2]
        rank = config.get("rank_pattern", {}).get(target, config["r"])
        alpha = config.get("alpha_pattern", {}).get(target, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = scale * (tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double())
        weight = weights[f"{module}.weight"]
        turned = delta.t() if config.get("fan_in_fan_out") else delta
        weights[f"{module}.weight"] = (weight.double() + turned).to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path

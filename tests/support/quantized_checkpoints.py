"""Checkpoints in the formats that quantised models come in, made out of a plain one: small, and on the spot.

Each writer rounds the linear layers in the plainest way and packs them with a loop over the places of a word, so that
it shares nothing with the readers it tests. What it returns are the weights that the file stands for, as floats: with
them Transformers computes what a reader must lead to.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# name of a weight -> the numbers that the file stands for
Weights = dict[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_gptq(
    path: Path,
    source: Path,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    version: str = "gptq",
    skipped: tuple[str, ...] = (),
) -> Weights:
    """GPTQ, the first or the second version of the format; act_order: inputs belong to groups at random."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_columns = weight.shape[1]
        size = num_columns if group == -1 else group
        groups = torch.arange(num_columns) // size
        if act_order:
            groups = groups[torch.randperm(num_columns, generator=torch.Generator().manual_seed(len(name)))]
        codes, scales, zeros = round_by_groups(weight, groups, bits, symmetric=symmetric)
        stored_zeros = (zeros - (1 if version == "gptq" else 0)) % 2**bits
        tensors = {
            "qweight": pack_words(codes, bits).t().contiguous(),
            "qzeros": pack_words(stored_zeros.t(), bits),
            "scales": scales.t().contiguous().half(),
            "g_idx": groups.int(),
        }
        return tensors, (codes - zeros[:, groups]) * scales[:, groups]

    declared = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
    return _write(path, source, {**declared, "checkpoint_format": version}, store, skipped)


def write_awq(path: Path, source: Path, *, group: int = 32, skipped: tuple[str, ...] = ()) -> Weights:
    """AWQ in its gemm version."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = round_by_groups(weight, groups, 4)
        tensors = {
            "qweight": pack_words(codes.t(), 4, _AWQ_ORDER),
            "qzeros": pack_words(zeros.t(), 4, _AWQ_ORDER),
            "scales": scales.t().contiguous().half(),
        }
        return tensors, (codes - zeros[:, groups]) * scales[:, groups]

    declared = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return _write(path, source, {**declared, "modules_to_not_convert": list(skipped) or None}, store, skipped)


def write_compressed_int8(
    path: Path, source: Path, *, symmetric: bool = True, rounds_inputs: bool = True, skipped: tuple[str, ...] = ()
) -> Weights:
    """compressed-tensors, int-quantized: a byte a weight and a scale an output."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = torch.zeros(weight.shape[1], dtype=torch.int64)
        codes, scales, zeros = round_by_groups(weight, groups, 8, symmetric=symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, (codes - zeros) * scales

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": symmetric, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} if rounds_inputs else None
    return _write(path, source, _compressed("int-quantized", weights, inputs, skipped), store, skipped)


def write_compressed_packed(
    path: Path,
    source: Path,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    skipped: tuple[str, ...] = (),
) -> Weights:
    """compressed-tensors, pack-quantized."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        if act_order:
            groups = groups.flip(0)
        codes, scales, zeros = round_by_groups(weight, groups, bits, symmetric=symmetric)
        tensors = {
            "weight_packed": pack_words(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.t(), bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, (codes - zeros[:, groups]) * scales.bfloat16().float()[:, groups]

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    return _write(path, source, _compressed("pack-quantized", weights, None, skipped), store, skipped)


def write_compressed_fp8(path: Path, source: Path, *, by_channel: bool = True) -> Weights:
    """compressed-tensors, float-quantized."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        most = weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax().view(1)
        scale = most / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
        return tensors, codes.float() * scale

    strategy = "channel" if by_channel else "tensor"
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    return _write(path, source, _compressed("float-quantized", weights, None, ("lm_head",)), store, ("lm_head",))


def write_fp8(path: Path, source: Path, *, block: tuple[int, int] | None = (128, 128)) -> Weights:
    """Plain fp8: a scale for each block, or for each tensor."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or weight.shape
        spread = torch.empty_like(weight)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
                scales[row, column] = weight[place].abs().amax() / 448
                spread[place] = scales[row, column]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        leaf = "weight_scale_inv" if block else "weight_scale"
        return {"weight": codes, leaf: scales if block else scales.view(())}, codes.float() * spread

    declared: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block:
        declared["weight_block_size"] = list(block)
    return _write(path, source, declared, store, ("lm_head",))


def write_mxfp4(path: Path, source: Path) -> Weights:
    """MXFP4, as gpt-oss is published: the experts of a layer as one tensor of codes and one of exponents."""
    tensors: dict[str, Tensor] = {}
    weights: Weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weights[name] = weight
            continue
        groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, outputs, groups, 32]
        exponents = (groups.abs().amax(-1) / 6).clamp(min=1e-9).log2().ceil()
        values = torch.tensor([float4(code) for code in range(16)])
        scaled = groups / 2.0 ** exponents[..., None]
        codes = (scaled[..., None] - values).abs().argmin(-1)
        codes[..., 5] = 8  # some negative zeros
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).contiguous()
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        weights[name] = (values[codes] * 2.0 ** exponents[..., None]).flatten(2).transpose(1, 2).contiguous()
    _write_files(path, source, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    return weights


def write_float4(path: Path, source: Path, *, kind: str, group: int) -> Weights:
    """Floats of 4 bits: `compressed` with groups of 16 or 32, or `modelopt` with groups of 16."""
    values = torch.tensor([float4(code) for code in range(16)])

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.unflatten(1, (-1, group))
        scales = (groups.abs().amax(-1) / 6).clamp(min=1e-9)
        if group == 32:
            exponents = scales.log2().ceil()
            stored, scales = {"weight_scale": (exponents + 127).to(torch.uint8)}, 2.0**exponents
        else:
            of_tensor = scales.amax() / 448
            codes = (scales / of_tensor).to(torch.float8_e4m3fn)
            scales = codes.float() * of_tensor
            is_compressed = kind == "compressed"
            leaf, value = ("weight_global_scale", 1 / of_tensor) if is_compressed else ("weight_scale_2", of_tensor)
            stored = {"weight_scale": codes, leaf: value.view(1) if is_compressed else value}
            stored |= {"input_global_scale" if is_compressed else "input_scale": torch.ones(1)}
        chosen = (groups / scales[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1)
        packed = (chosen.flatten(1)[:, 0::2] + 16 * chosen.flatten(1)[:, 1::2]).to(torch.uint8).contiguous()
        stored["weight_packed" if kind == "compressed" else "weight"] = packed
        return stored, (values[chosen] * scales[..., None]).flatten(1)

    declared: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    if kind == "compressed":
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group, "symmetric": True}
        declared = _compressed(f"{'nv' if group == 16 else 'mx'}fp4-pack-quantized", weights, None, ("lm_head",))
    return _write(path, source, declared, store, ("lm_head",))


def float4(code: int) -> float:
    """E2M1: a sign, two bits of exponent, one of mantissa; without exponent the mantissa counts halves."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def reference_model(source: Path, weights: Weights) -> Any:
    """Transformers' model with these weights, by their names in the checkpoint, in the place of its own, in float32."""
    from transformers import AutoModelForCausalLM

    own = load_file(source / "model.safetensors")
    assert weights
    assert weights.keys() <= own.keys()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(source / "config.json", folder)
        merged = {name: weights.get(name, tensor).float().contiguous() for name, tensor in own.items()}
        save_file(merged, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def round_by_groups(
    weight: Tensor, groups: Tensor, bits: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 on, scales that float16 holds, and zero points of each group, by the extremes of the group."""
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = (
        torch.empty(weight.shape[0], num_groups),
        torch.empty(weight.shape[0], num_groups, dtype=torch.int64),
    )
    for group in range(num_groups):
        piece = weight[:, groups == group]
        low, high = piece.amin(1).clamp(max=0), piece.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).half().float().clamp(min=1e-6)
        scales[:, group] = scale
        zeros[:, group] = 2 ** (bits - 1) if symmetric else (-low / scale).round().long().clamp(0, most)
    codes = (weight / scales[:, groups]).round().long() + zeros[:, groups]
    return codes.clamp(0, most), scales, zeros


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] to int32 [R, C / (32 / bits)]; place i of a word holds number order[i] of its neighbours."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // per_word), dtype=torch.int64)
    for place, number in enumerate(order):
        column = codes[:, number::per_word].long()
        words[:, : column.shape[1]] |= column << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _compressed(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None, skipped: tuple[str, ...]
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(skipped),
        "kv_cache_scheme": None,
    }


def _write(
    path: Path,
    source: Path,
    declared: dict[str, Any],
    store: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    skipped: tuple[str, ...],
) -> Weights:
    tensors: Weights = {}
    weights: Weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or any(part in name for part in skipped):
            tensors[name] = tensor
            continue
        stored, weights[name] = store(name, tensor.float())
        tensors |= {f"{module}.{leaf}": part for leaf, part in stored.items()}
    _write_files(path, source, declared, tensors)
    return weights


def _write_files(path: Path, source: Path, declared: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path / file.name)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": declared}), encoding="utf-8")

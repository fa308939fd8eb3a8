"""compressed-tensors: integers of 8 bits, 4- or 8-bit codes packed into words, or FP8.

    int-quantized      weight int8 [N, K]                     weight_scale [N, G]   weight_zero_point int8 [N, G]
    pack-quantized     weight_packed int32 [N, K / (32 / bits)]  weight_scale [N, G]   weight_zero_point packed along N
                       weight_shape [2]                       weight_g_idx [K], the group of each input
    float-quantized    weight float8 [N, K]                   weight_scale [1], [N, 1] or blocks

What is stored tells which of them a layer has; config.json says how many bits, and whether inputs are rounded too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.checkpoints import fp8
from quire.worker.checkpoints.codes import (
    Reordered,
    are_in_order,
    dequantized_in_order,
    per_word,
    quantized,
    unpack_columns,
    unpack_rows,
)
from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.quantization import QuantizedWeight

_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "float-quantized", "mixed-precision", "dense")
_BITS = (4, 8)
_NO_GROUP: dict[str, Any] = {"weights": {"num_bits": 8}}


class CompressedTensorsFormat:
    leaves: tuple[str, ...] = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    )
    ignored: tuple[str, ...] = ("input_zero_point", "output_scale", "output_zero_point", *fp8.ACTIVATION_LEAVES)

    def __init__(self, declared: dict[str, Any], dtype: torch.dtype) -> None:
        stored = declared.get("format") or "mixed-precision"
        if stored not in _FORMATS:
            raise unsupported("format", stored, _FORMATS)
        sparsity = (declared.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise unsupported("sparsity_config.format", sparsity, ("dense",))
        if declared.get("transform_config"):
            raise unsupported("transform_config", "...", ("none",))
        self._groups: list[dict[str, Any]] = list((declared.get("config_groups") or {}).values())
        for group in self._groups:
            own = group.get("format") or stored
            if own not in _FORMATS:
                raise unsupported("config_groups: format", own, _FORMATS)
        self._dtype = dtype
        self._num_converted = 0
        self._reordered = Reordered("compressed-tensors", dtype)

    def is_quantized(self, module: StoredModule) -> bool:
        return "weight_packed" in module.leaves or {"weight", "weight_scale"} <= module.leaves.keys()

    def weights(self, module: StoredModule) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
        yield f"{module.name}.weight", self._weight(module)

    def _weight(self, module: StoredModule) -> Tensor | QuantizedWeight:
        group = self._group_of(module.name)
        weights = group.get("weights") or {}
        bits, rounds_inputs = weights.get("num_bits", 8), bool(group.get("input_activations"))
        if "weight_packed" in module.leaves:
            return self._packed(module, bits, weight_only=not rounds_inputs)
        weight = module.get("weight")
        if weight.dtype == torch.int8:
            return self._integers(module, weight, bits, weight_only=not rounds_inputs)
        self._num_converted += 1
        block = fp8.block_sizes("block_structure", weights.get("block_structure"))
        return fp8.converted(module, weight, module.get("weight_scale"), block, self._dtype)

    def remarks(self) -> list[str]:
        converted = [fp8.remark(self._num_converted, self._dtype)] if self._num_converted else []
        return converted + self._reordered.remarks()

    def _group_of(self, name: str) -> dict[str, Any]:
        """The settings of a module: the first group one of whose targets is its name, a pattern of it, or its class."""
        for group in self._groups:
            for target in group.get("targets") or []:
                if target == "Linear" or name == target or name.endswith(f".{target}"):
                    return group
                if str(target).startswith("re:") and _matches(str(target)[3:], name):
                    return group
        return self._groups[0] if self._groups else _NO_GROUP

    def _integers(self, module: StoredModule, weight: Tensor, bits: int, *, weight_only: bool) -> QuantizedWeight:
        if bits not in _BITS:
            raise unsupported("num_bits", bits, _BITS)
        scales = _scales(module, *weight.shape)
        zeros = module.find("weight_zero_point")
        # As codes from 0 on, which all readers hand on.
        half = 2 ** (bits - 1)
        codes = (weight.to(torch.int16) + half).clamp_(0, 2 * half - 1).to(torch.uint8)
        zeros = torch.zeros_like(scales) if zeros is None else zeros.view(zeros.shape[0], -1).to(torch.float32)
        module.check(zeros.numel() in (1, scales.numel()), "weight_zero_point", zeros, f"{list(scales.shape)}")
        return quantized(codes, scales, zeros.expand_as(scales) + half, bits, weight_only=weight_only)

    def _packed(self, module: StoredModule, bits: int, *, weight_only: bool) -> Tensor | QuantizedWeight:
        packed, shape = module.get("weight_packed"), module.get("weight_shape")
        if packed.dtype != torch.int32:
            raise unsupported("format", "weights of 4-bit floats", _FORMATS)
        if bits not in _BITS:
            raise unsupported("num_bits", bits, _BITS)
        module.check(shape.shape == (2,) and int(shape.min()) > 0, "weight_shape", shape, "two sizes")
        num_rows, num_columns = (int(size) for size in shape)
        wanted = (num_rows, -(-num_columns // per_word(bits)))
        module.check(tuple(packed.shape) == wanted, "weight_packed", packed, f"{list(wanted)} for {bits} bits")
        codes_NK = unpack_rows(packed, bits)[:, :num_columns].contiguous()
        scales_NG = _scales(module, num_rows, num_columns)
        zeros_NG = torch.full_like(scales_NG, 2.0 ** (bits - 1))
        stored = module.find("weight_zero_point")
        if stored is not None:
            # Packed along the outputs; a word of the last ones may be partly empty.
            zeros_NG = unpack_columns(stored, bits).t()[:num_rows] if stored.dtype == torch.int32 else stored + zeros_NG
            module.check(
                zeros_NG.shape == scales_NG.shape, "weight_zero_point", stored, f"zeros for {list(scales_NG.shape)}"
            )
        groups_K = module.find("weight_g_idx")
        if groups_K is not None and not are_in_order(module, "weight_g_idx", groups_K, num_columns, scales_NG.shape[1]):
            self._reordered.count += 1
            return dequantized_in_order(codes_NK, scales_NG, zeros_NG, groups_K.long(), self._dtype)
        return quantized(codes_NK, scales_NG, zeros_NG, bits, weight_only=weight_only)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ModelError(
            f"config.json: quantization_config: the target re:{pattern} is no regular expression ({error}). Take the "
            "config.json of the checkpoint."
        ) from None


def _scales(module: StoredModule, num_rows: int, num_columns: int) -> Tensor:
    """[N, G]: a scale for the tensor, for each output, or for each group of inputs."""
    scales = module.get("weight_scale")
    found = scales.to(torch.float32)
    if found.numel() == 1:
        return found.reshape(1, 1).expand(num_rows, 1).contiguous()
    fits = found.ndim > 0 and found.shape[0] == num_rows and found.numel() > 0
    module.check(fits, "weight_scale", scales, f"[{num_rows}, groups]")
    found = found.reshape(num_rows, -1)
    if num_columns % found.shape[1]:
        raise ModelError(
            f"{module.name}.weight_scale: {found.shape[1]} groups do not divide {num_columns} inputs evenly."
        )
    return found

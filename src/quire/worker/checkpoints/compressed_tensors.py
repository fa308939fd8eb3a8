"""compressed-tensors: integers of 8 bits, 4- or 8-bit codes packed into words, FP8, or floats of 4 bits.

    int-quantized      weight int8 [N, K]                     weight_scale [N, G]   weight_zero_point int8 [N, G]
    pack-quantized     weight_packed int32 [N, K / (32 / bits)]  weight_scale [N, G]   weight_zero_point packed along N
                       weight_shape [2]                       weight_g_idx [K], the group of each input
    float-quantized    weight float8 [N, K]                   weight_scale [1], [N, 1] or blocks
    nvfp4-pack-quantized  weight_packed uint8 [N, K / 2]      weight_scale float8 [N, K / 16], over weight_global_scale
    mxfp4-pack-quantized  weight_packed uint8 [N, K / 2]      weight_scale uint8 [N, K / 32], exponents

What is stored tells which of them a layer has; config.json says how many bits, and whether inputs are rounded too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import regex
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.checkpoints import fp8
from quire.worker.checkpoints.codes import (
    Reordered,
    are_in_order,
    dequantized_in_order,
    parts_of,
    per_word,
    quantized,
    unpack_columns,
    unpack_rows,
)
from quire.worker.checkpoints.float4 import scale_of_tensor, stored_float4
from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight

_FORMATS = (
    "int-quantized", "naive-quantized", "pack-quantized", "float-quantized", "mixed-precision", "dense",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized",
)  # fmt: skip
# a pattern comes from a file, and one that tries all ways to match a name could take years
_MOST_SECONDS_TO_MATCH = 1.0
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
        "weight_global_scale",
    )
    ignored: tuple[str, ...] = (
        "input_global_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
        *fp8.ACTIVATION_LEAVES,
    )

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

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        yield f"{module.name}.weight", self._weight(module)

    def _weight(self, module: StoredModule) -> StoredWeight:
        group = self._group_of(module.name)
        weights = group.get("weights") or {}
        bits, rounds_inputs = weights.get("num_bits", 8), bool(group.get("input_activations"))
        if "weight_packed" in module.leaves and module.get("weight_packed").dtype == torch.uint8:
            over = scale_of_tensor(module, "weight_global_scale")
            of_tensor = None if over is None else over.reciprocal()
            return stored_float4(module, "weight_packed", of_tensor, self._dtype)
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

    def _integers(self, module: StoredModule, weight: Tensor, bits: int, *, weight_only: bool) -> StoredWeight:
        if bits not in _BITS:
            raise unsupported("num_bits", bits, _BITS)
        scales_NG = _scales(module, *weight.shape)
        stored = module.find("weight_zero_point")
        if stored is not None:
            is_one_each = stored.numel() in (1, scales_NG.numel())
            module.check(is_one_each, "weight_zero_point", stored, f"{list(scales_NG.shape)}")
            stored = stored.view(stored.shape[0], -1).expand_as(scales_NG)
        group = weight.shape[1] // scales_NG.shape[1]
        # As codes from 0 on, which all readers hand on.
        half = 2 ** (bits - 1)

        def read_part(rows: slice, columns: slice) -> QuantizedWeight:
            codes = (weight[rows, columns].to(torch.int16) + half).clamp_(0, 2 * half - 1).to(torch.uint8)
            groups = parts_of(columns, group)
            scales = scales_NG[rows, groups].to(torch.float32)
            zeros = torch.zeros_like(scales) if stored is None else stored[rows, groups].to(torch.float32)
            return quantized(codes, scales, zeros + half, bits, weight_only=weight_only)

        step = 1 if scales_NG.shape[1] == 1 else group
        return StoredWeight.of(weight.shape, weight.nbytes + scales_NG.nbytes, read_part, column_step=step)

    def _packed(self, module: StoredModule, bits: int, *, weight_only: bool) -> StoredWeight:
        packed, shape = module.get("weight_packed"), module.get("weight_shape")
        module.check(packed.dtype == torch.int32, "weight_packed", packed, "int32")
        if bits not in _BITS:
            raise unsupported("num_bits", bits, _BITS)
        module.check(shape.shape == (2,) and int(shape.min()) > 0, "weight_shape", shape, "two sizes")
        num_rows, num_columns = (int(size) for size in shape)
        wanted = (num_rows, -(-num_columns // per_word(bits)))
        module.check(tuple(packed.shape) == wanted, "weight_packed", packed, f"{list(wanted)} for {bits} bits")
        scales_NG = _scales(module, num_rows, num_columns)
        num_groups = scales_NG.shape[1]
        stored = module.find("weight_zero_point")
        if stored is not None:
            # Packed along the outputs; a word of the last ones may be partly empty.
            rows_of_words = -(-num_rows // per_word(bits)) if stored.dtype == torch.int32 else num_rows
            is_one_each = tuple(stored.shape) == (rows_of_words, num_groups)
            module.check(is_one_each, "weight_zero_point", stored, f"zeros for {list(scales_NG.shape)}")
        groups_K = module.find("weight_g_idx")
        is_reordered = groups_K is not None and not are_in_order(
            module, "weight_g_idx", groups_K, num_columns, num_groups
        )
        self._reordered.count += is_reordered
        group = num_columns if is_reordered or num_groups == 1 else num_columns // num_groups
        words = per_word(bits)

        def read_part(rows: slice, columns: slice) -> Tensor | QuantizedWeight:
            codes = unpack_rows(packed[rows, parts_of(columns, words)], bits)
            codes_NK = codes[:, : columns.stop - columns.start].contiguous()
            groups = slice(0, num_groups) if is_reordered else parts_of(columns, group)
            scales = scales_NG[rows, groups].to(torch.float32)
            zeros = torch.full_like(scales, 2.0 ** (bits - 1))
            if stored is not None and stored.dtype == torch.int32:
                zeros = unpack_columns(stored[parts_of(rows, words), groups], bits).t()[: len(scales)]
            elif stored is not None:
                zeros = stored[rows, groups] + zeros
            if is_reordered and groups_K is not None:
                return dequantized_in_order(codes_NK, scales, zeros, groups_K[columns].long(), self._dtype)
            return quantized(codes_NK, scales, zeros, bits, weight_only=weight_only)

        return StoredWeight.of(
            (num_rows, num_columns),
            packed.nbytes + scales_NG.nbytes,
            read_part,
            row_step=words,
            column_step=words if group == num_columns else math.lcm(words, group),
        )


def _matches(pattern: str, name: str) -> bool:
    try:
        return regex.match(pattern, name, timeout=_MOST_SECONDS_TO_MATCH) is not None
    except regex.error as error:
        fault = f"is no regular expression ({error})"
    except TimeoutError:
        fault = f"takes longer than {_MOST_SECONDS_TO_MATCH} s with the name {name}"
    raise ModelError(
        f"config.json: quantization_config: the target re:{pattern[:200]} {fault}. Take the config.json of the "
        "checkpoint."
    )


def _scales(module: StoredModule, num_rows: int, num_columns: int) -> Tensor:
    """[N, G]: a scale for the tensor, for each output, or for each group of inputs."""
    scales = module.get("weight_scale")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(num_rows, 1)
    fits = scales.ndim > 0 and scales.shape[0] == num_rows and scales.numel() > 0
    module.check(fits, "weight_scale", scales, f"[{num_rows}, groups]")
    found = scales.reshape(num_rows, -1)
    if num_columns % found.shape[1]:
        raise ModelError(
            f"{module.name}.weight_scale: {found.shape[1]} groups do not divide {num_columns} inputs evenly."
        )
    return found

"""GPTQ: 4- or 8-bit codes in groups, packed along the inputs.

    qweight  int32 [K / (32 / bits), N]      scales  [G, N]
    qzeros   int32 [G, N / (32 / bits)]      g_idx   int32 [K], the group of each input

A weight is scales * (code - zero). The first version of the format stores zero - 1. Bits and groups are read from the
shapes, so overrides for single modules need no look at config.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
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
from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight

_BITS = (4, 8)
_ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


class GPTQFormat:
    leaves: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    ignored: tuple[str, ...] = ()

    def __init__(self, declared: dict[str, Any], dtype: torch.dtype) -> None:
        bits, stored = declared.get("bits", 4), declared.get("checkpoint_format") or "gptq"
        if bits not in _BITS:
            raise unsupported("bits", bits, _BITS)
        if stored not in _ZERO_OFFSET:
            raise unsupported("checkpoint_format", stored, _ZERO_OFFSET)
        self._zero_offset = _ZERO_OFFSET[stored]
        self._dtype = dtype
        self._reordered = Reordered("GPTQ", dtype)

    def is_quantized(self, module: StoredModule) -> bool:
        return "qweight" in module.leaves

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        yield f"{module.name}.weight", self._weight(module)

    def _weight(self, module: StoredModule) -> StoredWeight:
        qweight, qzeros, scales = module.get("qweight"), module.get("qzeros"), module.get("scales")
        bits = self._bits(module, qzeros, scales)
        module.check(qweight.dtype == torch.int32 and qweight.ndim == 2, "qweight", qweight, "int32 [inputs, outputs]")
        num_inputs, num_outputs = qweight.shape[0] * per_word(bits), qweight.shape[1]
        module.check(scales.shape[1] == num_outputs, "scales", scales, f"[groups, {num_outputs}]")
        groups_K = module.find("g_idx")
        num_groups = scales.shape[0]
        is_reordered = groups_K is not None and not are_in_order(module, "g_idx", groups_K, num_inputs, num_groups)
        if is_reordered:
            self._reordered.count += 1
        elif num_inputs % num_groups:
            raise ModelError(f"{module.name}.scales: {num_groups} groups do not divide {num_inputs} inputs evenly.")
        group = num_inputs if is_reordered or num_groups == 1 else num_inputs // num_groups
        words = per_word(bits)

        def read_part(rows: slice, columns: slice) -> Tensor | QuantizedWeight:
            codes_NK = unpack_columns(qweight[parts_of(columns, words), rows], bits)
            stored_GN = unpack_rows(qzeros[:, parts_of(rows, words)], bits)
            # In the first version 0 is stored as the highest number, to which 1 is added without a carry.
            zeros_GN = stored_GN.to(torch.int16).add_(self._zero_offset).bitwise_and_(2**bits - 1)
            scales_NG = scales[:, rows].t().to(torch.float32)
            if is_reordered and groups_K is not None:
                groups = groups_K[columns].long()
                return dequantized_in_order(codes_NK, scales_NG, zeros_GN.t(), groups, self._dtype)
            groups = parts_of(columns, group)
            return quantized(codes_NK, scales_NG[:, groups], zeros_GN.t()[:, groups], bits, weight_only=True)

        return StoredWeight.of(
            (num_outputs, num_inputs),
            qweight.nbytes + scales.nbytes,
            read_part,
            row_step=words,
            column_step=words if group == num_inputs else math.lcm(words, group),
        )

    def remarks(self) -> list[str]:
        return self._reordered.remarks()

    def _bits(self, module: StoredModule, qzeros: Tensor, scales: Tensor) -> int:
        module.check(scales.ndim == 2 and scales.numel() > 0, "scales", scales, "[groups, outputs]")
        is_matrix = qzeros.dtype == torch.int32 and qzeros.ndim == 2 and qzeros.shape[0] == scales.shape[0]
        module.check(is_matrix, "qzeros", qzeros, f"int32 [{scales.shape[0]}, ...], a row for each of scales")
        codes, words = scales.shape[1], qzeros.shape[1]
        bits = next((bits for bits in _BITS if words * per_word(bits) == codes), None)
        module.check(
            bits is not None, "qzeros", qzeros, f"{codes} numbers of {' or '.join(map(str, _BITS))} bits a row"
        )
        assert bits is not None
        return bits

"""AWQ: 4-bit codes in groups, packed along the outputs in an order of their own.

    qweight  int32 [K, N / 8]      qzeros  int32 [G, N / 8]      scales  [G, N]

A weight is scales * (code - zero). Each word holds eight outputs, the even ones first: 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.checkpoints.codes import parts_of, per_word, quantized, unpack_rows
from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight

_BITS = 4
# Where output 0, 1, 2, ... of eight lies in a word.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


class AWQFormat:
    leaves: tuple[str, ...] = ("qweight", "qzeros", "scales")
    ignored: tuple[str, ...] = ()

    def __init__(self, declared: dict[str, Any]) -> None:
        bits = declared.get("bits", declared.get("w_bit", _BITS))
        if bits != _BITS:
            raise unsupported("bits", bits, (_BITS,))
        version = str(declared.get("version", "gemm")).lower()
        if version != "gemm":
            raise unsupported("version", version, ("gemm",))

    def is_quantized(self, module: StoredModule) -> bool:
        return "qweight" in module.leaves

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        yield f"{module.name}.weight", self._weight(module)

    def _weight(self, module: StoredModule) -> StoredWeight:
        qweight, qzeros, scales = module.get("qweight"), module.get("qzeros"), module.get("scales")
        module.check(qweight.dtype == torch.int32 and qweight.ndim == 2, "qweight", qweight, "int32 [inputs, words]")
        num_inputs, num_outputs = qweight.shape[0], qweight.shape[1] * per_word(_BITS)
        fits = scales.ndim == 2 and scales.shape[0] > 0 and scales.shape[1] == num_outputs
        module.check(fits, "scales", scales, f"[groups, {num_outputs}]")
        num_groups = scales.shape[0]
        wanted = (num_groups, qweight.shape[1])
        is_alike = qzeros.dtype == torch.int32 and qzeros.shape == wanted
        module.check(is_alike, "qzeros", qzeros, f"int32 {list(wanted)}")
        if num_inputs % num_groups:
            raise ModelError(f"{module.name}.scales: {num_groups} groups do not divide {num_inputs} inputs evenly.")
        group = num_inputs // num_groups

        def read_part(rows: slice, columns: slice) -> QuantizedWeight:
            words, groups = parts_of(rows, per_word(_BITS)), parts_of(columns, group)
            codes_NK = _in_order(qweight[columns, words]).t().contiguous()
            zeros_NG = _in_order(qzeros[groups, words]).t()
            return quantized(codes_NK, scales[groups, rows].t(), zeros_NG, _BITS, weight_only=True)

        return StoredWeight.of(
            (num_outputs, num_inputs),
            qweight.nbytes + scales.nbytes,
            read_part,
            row_step=per_word(_BITS),
            column_step=1 if num_groups == 1 else group,
        )

    def remarks(self) -> list[str]:
        return []


def _in_order(packed: Tensor) -> Tensor:
    codes = unpack_rows(packed, _BITS)
    return codes.view(codes.shape[0], -1, len(_PLACES))[..., _PLACES].flatten(1)

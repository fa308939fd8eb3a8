"""MXFP4: experts as 4-bit floats (E2M1), of which 32 inputs share a power of two (E8M0).

    gate_up_proj_blocks  uint8 [experts, N, K / 32, 16], two codes a byte, the earlier one in the low half
    gate_up_proj_scales  uint8 [experts, N, K / 32], the exponent + 127
    down_proj_blocks, down_proj_scales    the same

The experts of a layer are one tensor; they are handed on one by one, so that only one of them is spread out at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.worker.checkpoints.codes import parts_of
from quire.worker.checkpoints.stored_module import StoredModule
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight

_PROJECTIONS = ("gate_up_proj", "down_proj")
_GROUP = 32
_EXPONENT_OF_ONE = 127
_MOST_EXPONENT = 252
# Twice the values of the codes: whole numbers.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class MXFP4Format:
    leaves: tuple[str, ...] = tuple(f"{name}_{part}" for name in _PROJECTIONS for part in ("blocks", "scales"))
    ignored: tuple[str, ...] = ()

    def __init__(self) -> None:
        low_half_first = [[_DOUBLED[byte & 15], _DOUBLED[byte >> 4]] for byte in range(256)]
        # a pair of numbers as one, so that a byte is looked up once
        self._pairs = torch.tensor(low_half_first, dtype=torch.int8).view(torch.int16).flatten()

    def is_quantized(self, module: StoredModule) -> bool:
        return any(leaf in module.leaves for leaf in self.leaves)

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        for projection in _PROJECTIONS:
            blocks, scales = module.get(f"{projection}_blocks"), module.get(f"{projection}_scales")
            is_whole = blocks.dtype == torch.uint8 and blocks.ndim == 4 and blocks.shape[3] == _GROUP // 2
            is_whole = is_whole and blocks.numel() > 0
            module.check(is_whole, f"{projection}_blocks", blocks, f"uint8 [experts, outputs, groups, {_GROUP // 2}]")
            fits = scales.dtype == torch.uint8 and scales.shape == blocks.shape[:3]
            module.check(fits, f"{projection}_scales", scales, f"uint8 {list(blocks.shape[:3])}")
            for number in range(len(blocks)):
                yield f"{module.name}.{number}.{projection}.weight", self._expert(blocks[number], scales[number])

    def remarks(self) -> list[str]:
        return []

    def _expert(self, blocks_NGb: Tensor, scales_NG: Tensor) -> StoredWeight:
        def read_part(rows: slice, columns: slice) -> QuantizedWeight:
            groups = parts_of(columns, _GROUP)
            return self._spread(blocks_NGb[rows, groups], scales_NG[rows, groups])

        num_rows, num_groups = scales_NG.shape
        shape = (num_rows, num_groups * _GROUP)
        return StoredWeight.of(shape, blocks_NGb.nbytes + scales_NG.nbytes, read_part, column_step=_GROUP)

    def _spread(self, blocks_NGb: Tensor, scales_NG: Tensor) -> QuantizedWeight:
        pairs = self._pairs.index_select(0, blocks_NGb.flatten().int())
        values_NK = pairs.view(torch.int8).view(len(blocks_NGb), -1)
        # of doubled values; 255 means no number in this format, and with 253 the largest code is none in float32: both
        # become infinities, which are refused
        exponents = scales_NG.int() - _EXPONENT_OF_ONE
        halves = torch.full(scales_NG.shape, 0.5)
        halved = torch.ldexp(halves, exponents).masked_fill_(scales_NG > _MOST_EXPONENT, torch.inf)
        return QuantizedWeight(values_NK, halved, None, bits=4, weight_only=True)

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

from quire.worker.checkpoints.float4 import float4_weight, halved_powers
from quire.worker.checkpoints.stored_module import StoredModule
from quire.worker.layers.stored_weight import StoredWeight

_PROJECTIONS = ("gate_up_proj", "down_proj")
_GROUP = 32


class MXFP4Format:
    leaves: tuple[str, ...] = tuple(f"{name}_{part}" for name in _PROJECTIONS for part in ("blocks", "scales"))
    ignored: tuple[str, ...] = ()

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
                yield f"{module.name}.{number}.{projection}.weight", _expert(blocks[number], scales[number])

    def remarks(self) -> list[str]:
        return []


def _expert(blocks_NGb: Tensor, scales_NG: Tensor) -> StoredWeight:
    return float4_weight(
        blocks_NGb.flatten(1),
        _GROUP,
        blocks_NGb.nbytes + scales_NG.nbytes,
        lambda rows, groups: halved_powers(scales_NG[rows, groups]),
    )

"""ModelOpt: NVFP4, floats of 4 bits in groups of 16 with FP8 scales and one of the tensor; or FP8 by tensor.

NVFP4   weight uint8 [N, K / 2]    weight_scale float8 [N, K / 16]    weight_scale_2 [1]
FP8     weight float8 [N, K]       weight_scale [1]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.worker.checkpoints import fp8
from quire.worker.checkpoints.float4 import scale_of_tensor, stored_float4
from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.stored_weight import StoredWeight

_ALGORITHMS = ("NVFP4", "FP8")


class ModelOptFormat:
    leaves: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2")
    ignored: tuple[str, ...] = fp8.ACTIVATION_LEAVES

    def __init__(self, declared: dict[str, Any], dtype: torch.dtype) -> None:
        algorithm = declared.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            raise unsupported("quant_algo", algorithm, _ALGORITHMS)
        self._dtype = dtype
        self._num_converted = 0

    def is_quantized(self, module: StoredModule) -> bool:
        return {"weight", "weight_scale"} <= module.leaves.keys()

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        of_tensor = scale_of_tensor(module, "weight_scale_2")
        if of_tensor is not None:
            yield f"{module.name}.weight", stored_float4(module, "weight", of_tensor, self._dtype)
            return
        self._num_converted += 1
        weight, scale = module.get("weight"), module.get("weight_scale")
        yield f"{module.name}.weight", fp8.converted(module, weight, scale, None, self._dtype)

    def remarks(self) -> list[str]:
        return [fp8.remark(self._num_converted, self._dtype)] if self._num_converted else []

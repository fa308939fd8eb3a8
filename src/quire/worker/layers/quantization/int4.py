"""int4: weights in 4 bits in groups of 32 inputs, inputs rounded to 8 bits on the way.

The head stays in 8 bits: its errors reach the logits without a layer that could soften them (docs/quantization.md has
the measurement). So does a layer whose width cannot be cut into groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.worker.layers.quantization.quantized_weight import QuantizedWeight
from quire.worker.layers.quantization.rounding import INT4_GROUP, to_int4, to_int8
from quire.worker.layers.quantization.scheme import Role


@dataclass(frozen=True)
class Int4:
    name: str
    weight_only: bool
    bits: int = 4
    head_bits: int = 8

    def quantize(self, weight_NK: Tensor, role: Role) -> QuantizedWeight | None:
        if role == "head" or weight_NK.shape[1] % INT4_GROUP:
            return to_int8(weight_NK, weight_only=self.weight_only)
        return to_int4(weight_NK, weight_only=self.weight_only)


SCHEME = Int4("int4", weight_only=False)

"""int4: weights in 4 bits in groups of 32 inputs, inputs rounded to 8 bits on the way.

The head gets 6 bits: its errors reach the logits without a layer that could soften them (docs/quantization.md has the
measurement). A layer whose width cannot be cut into groups gets 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.worker.layers.quantization.quantized_weight import QuantizedWeight
from quire.worker.layers.quantization.rounding import GROUP, to_int4, to_int6, to_int8
from quire.worker.layers.quantization.scheme import Role


@dataclass(frozen=True)
class Int4:
    name: str
    weight_only: bool
    bits: int = 4
    head_bits: int = 6

    def quantize(self, weight_NK: Tensor, role: Role) -> QuantizedWeight | None:
        if weight_NK.shape[1] % GROUP:
            return to_int8(weight_NK, weight_only=self.weight_only)
        if role == "head":
            return to_int6(weight_NK, weight_only=self.weight_only)
        return to_int4(weight_NK, weight_only=self.weight_only)


SCHEME = Int4("int4", weight_only=False)

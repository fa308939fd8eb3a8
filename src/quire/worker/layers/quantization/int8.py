"""int8: weights in 8 bits with a scale for each output, inputs rounded to 8 bits on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.worker.layers.quantization.quantized_weight import QuantizedWeight
from quire.worker.layers.quantization.rounding import to_int8
from quire.worker.layers.quantization.scheme import Role


@dataclass(frozen=True)
class Int8:
    name: str
    weight_only: bool
    bits: int = 8
    head_bits: int = 8

    def quantize(self, weight_NK: Tensor, role: Role) -> QuantizedWeight | None:
        return to_int8(weight_NK, weight_only=self.weight_only)


SCHEME = Int8("int8", weight_only=False)

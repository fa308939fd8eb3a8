"""int8_weight_only: the weights of int8, inputs as they are. Nearer to the float model, and slower on many tokens."""

from __future__ import annotations

from quire.worker.layers.quantization.int8 import Int8

SCHEME = Int8("int8_weight_only", weight_only=True)

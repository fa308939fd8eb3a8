"""int4_weight_only: the weights of int4, inputs as they are. Nearer to the float model, and slower on many tokens."""

from __future__ import annotations

from quire.worker.layers.quantization.int4 import Int4

SCHEME = Int4("int4_weight_only", weight_only=True)

"""The way back from a packed weight."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels.reference.packed_format import dequantized_rows


def unpack_weight(packed: Tensor) -> Tensor:
    """The weight that the packed one stands for, float32 [N, K]."""
    return dequantized_rows(packed)

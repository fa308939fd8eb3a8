"""A float weight that describes itself."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels.reference.packed_format import PackedHeader, assemble


def pack_weight(weight_NK: Tensor) -> Tensor:
    """The weight behind a header, in its own dtype."""
    num_rows, num_columns = weight_NK.shape
    return assemble(PackedHeader(weight_NK.dtype, num_rows, num_columns), weight_NK)

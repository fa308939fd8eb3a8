"""Adapters (LoRA): what some tokens add to the output of a linear layer. Specified in `reference/add_adapters.py`."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators


def add_adapters(
    y_TN: Tensor, x_TC: Tensor, slots_T: Tensor, ranks_L: Tensor, a_LPGC: Tensor, b_LGN: Tensor, parts_P: list[int]
) -> None:
    """y += B (A x), in place, with the matrices of each token's slot; a token of slot -1 keeps its bits.

    The outputs of a merged layer are parts of `parts_P` columns, each with an A of its own. Sums are in float32, y is
    rounded once, and a row gives the same bits whatever other rows there are. Of a slot the first ranks_L rows count.
    """
    operators.add_adapters(y_TN, x_TC, slots_T, ranks_L, a_LPGC, b_LGN, parts_P)

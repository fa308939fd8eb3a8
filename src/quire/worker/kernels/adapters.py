"""Adapters (LoRA): what some tokens add to the output of a linear layer. Specified in `reference/add_adapters.py`."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators
from quire.worker.kernels.reference.adapter_format import AdapterFormat

__all__ = ["AdapterFormat", "add_adapters"]


def add_adapters(
    y_TN: Tensor,
    x_TC: Tensor,
    slots_T: Tensor,
    ranks_L: Tensor,
    a_LE: Tensor,
    b_LE: Tensor,
    parts_P: list[int],
    most_rank: int,
) -> None:
    """y += B (A x), in place, with the matrices of each token's slot; a token of slot -1 keeps its bits.

    The outputs of a merged layer are parts of `parts_P` columns, each with an A of its own. Sums are in float32, y is
    rounded once, and a row gives the same bits whatever other rows there are. `AdapterFormat` says how slots of
    `most_rank` are laid out; ranks_L are those that the adapters in them have.
    """
    operators.add_adapters(y_TN, x_TC, slots_T, ranks_L, a_LE, b_LE, parts_P, most_rank)

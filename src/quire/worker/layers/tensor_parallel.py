"""The group of workers that share each layer of a model (4.3.1, tensor parallelism).

Alone, a worker is rank 0 of 1 and nothing is reduced. How a layer comes to know its group: `ranks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.config.engine_config import SLICES_OF_A_SUM
from quire.errors import ModelError
from quire.worker import kernels
from quire.worker.kernels.reference.all_reduce import share_of


class AllReduce(Protocol):
    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The sum over the ranks in float32, plus `bias`, rounded to `dtype` or that of x."""


class AllGather(Protocol):
    def __call__(self, x: Tensor, total: int) -> Tensor:
        """[N, total]: what the ranks bring side by side, each the columns that are its `range_of` them."""


def _nothing_to_gather(x: Tensor, total: int) -> Tensor:
    return x


def _nothing_to_reduce(x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return x


@dataclass(frozen=True)
class TensorParallelGroup:
    """This worker's rank among `size`; `all_reduce` returns the sum over the ranks, `all_gather` what all have."""

    rank: int = 0
    size: int = 1
    all_reduce: AllReduce = _nothing_to_reduce
    all_gather: AllGather = _nothing_to_gather
    # of a weight whose products are summed over the ranks: in so many slices each rank adds up its own
    num_slices: int = 1
    # experts are whole on one of the ranks, instead of a part of each on all (expert parallelism)
    has_whole_experts: bool = False

    @classmethod
    def around(
        cls,
        meeting: Tensor | None,
        rank: int,
        size: int,
        *,
        has_equal_bits: bool = False,
        has_whole_experts: bool = False,
    ) -> TensorParallelGroup:
        """Ranks that meet in memory which they share; alone nobody does. `has_equal_bits`: whatever the size."""
        num_slices = SLICES_OF_A_SUM // size if has_equal_bits else 1
        if meeting is None:
            return cls(num_slices=num_slices)
        shared = meeting

        def all_reduce(x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
            return kernels.all_reduce(x, bias, shared, rank, size, dtype or x.dtype)

        def all_gather(x: Tensor, total: int) -> Tensor:
            return kernels.all_gather(x, shared, rank, size, total)

        return cls(rank, size, all_reduce, all_gather, num_slices, has_whole_experts)

    def agree(self, number: float) -> float:
        """Rank 0's: what only time tells is decided once. All ranks call it at the same place."""
        return self.total(number if self.rank == 0 else 0.0)

    def total(self, number: float) -> float:
        """The sum of what all ranks bring, each at the same place."""
        if self.size == 1:
            return number
        return float(self.all_reduce(torch.tensor([float(number)])))

    def share_of(self, total: int, what: str) -> int:
        """How many of `total` this rank owns."""
        if total % self.size:
            raise ModelError(
                f"{what}={total}: cannot be shared evenly by {self.size} workers. "
                f"Choose a number of workers that divides {total}."
            )
        return total // self.size

    def range_of(self, total: int) -> range:
        """Those of `total` that this rank owns, where they need not be shared evenly."""
        return share_of(total, self.rank, self.size)

    def slice_of(self, tensor: Tensor, dim: int, rank: int | None = None, size: int | None = None) -> Tensor:
        """This rank's piece of a whole tensor."""
        size = self.size if size is None else size
        if size == 1:
            return tensor
        length = tensor.shape[dim] // size
        return tensor.narrow(dim, (self.rank if rank is None else rank) * length, length)

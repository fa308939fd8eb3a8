"""The group of workers that share each layer of a model (4.3.1, tensor parallelism).

A layer asks for the group when it is built, so that the author of a model never mentions it. Alone, a worker is rank 0
of 1 and nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from quire.errors import ModelError


def _nothing_to_reduce(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class TensorParallelGroup:
    """This worker's rank among `size`; `all_reduce` returns the sum over the ranks."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _nothing_to_reduce

    def share_of(self, total: int, what: str) -> int:
        """How many of `total` this rank owns."""
        if total % self.size:
            raise ModelError(
                f"{what}={total}: cannot be shared evenly by {self.size} workers. "
                f"Choose a number of workers that divides {total}."
            )
        return total // self.size

    def slice_of(self, tensor: Tensor, dim: int, rank: int | None = None, size: int | None = None) -> Tensor:
        """This rank's piece of a whole tensor."""
        size = self.size if size is None else size
        if size == 1:
            return tensor
        length = tensor.shape[dim] // size
        return tensor.narrow(dim, (self.rank if rank is None else rank) * length, length)


_ALONE = TensorParallelGroup()
_current: ContextVar[TensorParallelGroup] = ContextVar("quire_tensor_parallel", default=_ALONE)


@contextmanager
def tensor_parallel(group: TensorParallelGroup) -> Iterator[None]:
    """Layers that are built inside belong to `group`."""
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)


def current_group() -> TensorParallelGroup:
    return _current.get()

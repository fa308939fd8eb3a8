"""This worker among those that run a model together: with whom it shares layers, KV and the list of layers.

A layer asks for its group when it is built, so that the author of a model never mentions it. Alone, a worker is rank 0
of 1 in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.config import WorkerConfig
from quire.errors import EngineError
from quire.worker import kernels
from quire.worker.layers.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True)
class RankGroup:
    """Workers that differ in one coordinate of the grid: this one's among `size`, and the memory in which they meet."""

    rank: int = 0
    size: int = 1
    meeting: Tensor | None = None

    def agree(self, number: float) -> float:
        """Rank 0's: what only time tells is decided once. All of the group call it at the same place."""
        return self.total(number if self.rank == 0 else 0.0)

    def gather(self, x: Tensor) -> Tensor:
        """[N, size * columns]: the rows of all of the group side by side."""
        if self.meeting is None:
            return x
        return kernels.all_gather(x, self.meeting, self.rank, self.size, self.size * x.shape[1])

    def total(self, number: float) -> float:
        """The sum of what all of the group bring, each at the same place."""
        if self.meeting is None:
            return number
        own = torch.tensor([float(number)])
        return float(kernels.all_reduce(own, None, self.meeting, self.rank, self.size, own.dtype))


@dataclass(frozen=True)
class StageGroup:
    """The stages that a model's layers are divided over, this worker's among them, and the memory by which each sends
    to the next."""

    rank: int = 0
    size: int = 1
    meeting: Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def share_of(self, num_layers: int) -> range:
        """The layers of this stage."""
        return range(num_layers * self.rank // self.size, num_layers * (self.rank + 1) // self.size)

    def send(self, x: Tensor) -> None:
        """To the next stage, which receives tensors of the same sizes in the same order."""
        assert self.meeting is not None
        kernels.send(x, self.meeting, self.rank, self.size - 1)

    def receive(self, out: Tensor) -> Tensor:
        """All of `out` from the stage before; raises once another worker is lost."""
        assert self.meeting is not None
        kernels.receive(out, self.meeting, self.rank - 1, self.size - 1)
        if int(self.meeting[:4].view(torch.int32)):
            raise EngineError("the stage before has gone away.")
        return out


@dataclass(frozen=True)
class Ranks:
    """The groups that a worker belongs to."""

    tensor: TensorParallelGroup = field(default_factory=TensorParallelGroup)
    context: RankGroup = field(default_factory=RankGroup)
    stages: StageGroup = field(default_factory=StageGroup)

    @classmethod
    def of(cls, config: WorkerConfig, meetings: dict[str, Tensor] | None = None) -> Ranks:
        """Those of a rank; `meetings`: memory shared by each of its groups, by direction."""
        grid, place = config.grid, config.place
        shared = meetings or {}
        tensor = TensorParallelGroup.around(
            shared.get("tensor"),
            place.tensor,
            grid.tensor,
            has_equal_bits=config.rank_invariant,
            has_whole_experts=grid.has_whole_experts,
        )
        context = RankGroup(place.context, grid.context, shared.get("context"))
        return cls(tensor, context, StageGroup(place.stage, grid.pipeline, shared.get("stage")))

    @property
    def size(self) -> int:
        return self.tensor.size * self.context.size * self.stages.size

    @property
    def num_in_stage(self) -> int:
        return self.tensor.size * self.context.size

    @property
    def number(self) -> int:
        """Of this rank among those of its stage."""
        return self.context.rank * self.tensor.size + self.tensor.rank

    def gather(self, x: Tensor) -> Tensor:
        """[N, columns of all]: what all of this stage bring, side by side in the order of their numbers."""
        return self.context.gather(self.tensor.all_gather(x, self.tensor.size * x.shape[1]))

    def from_first(self, x: Tensor) -> Tensor:
        """What the first of this stage brings; the others bring as much of anything."""
        num_columns = x.shape[1]
        x = self.context.gather(x)[:, :num_columns].contiguous()
        return self.tensor.all_gather(x, self.tensor.size * num_columns)[:, :num_columns]

    def agree(self, number: float) -> float:
        """What the first rank of this stage says: stages have layers of their own, and take times of their own."""
        return self.tensor.agree(self.context.agree(number))

    def total(self, number: float) -> float:
        """The sum of what all of this stage bring."""
        return self.tensor.total(self.context.total(number))


_ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("quire_ranks", default=_ALONE)


@contextmanager
def among(ranks: Ranks) -> Iterator[None]:
    """Layers that are built inside belong to these groups."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


def tensor_parallel(group: TensorParallelGroup) -> AbstractContextManager[None]:
    """The same for those that share each layer alone."""
    return among(Ranks(tensor=group))


def current_ranks() -> Ranks:
    return _current.get()


def current_group() -> TensorParallelGroup:
    """Those that share each layer."""
    return current_ranks().tensor

"""What the engine must know about the machine that a worker computes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from quire.config.process_memory import MemoryReport
from quire.errors import OptionError

if TYPE_CHECKING:
    from quire.worker.compilation.graphs import GraphDevice
    from quire.worker.copy_lane import CopyLane

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PeakMemory:
    """Filled when the measurement ends: the most memory that was in use above what was in use at its start."""

    peak_bytes: int = 0


class Platform(Protocol):
    """One kind of device."""

    name: str
    device: torch.device
    supported_dtypes: tuple[torch.dtype, ...]
    # whether a model runs faster there in pieces that torch's compiler has made than in any other way that there is
    gains_from_compiling: bool

    def dtype(self, name: str) -> torch.dtype:
        """The type of this name, or OptionError if the device does not compute in it."""
        ...

    def memory(self) -> MemoryReport:
        """As this process sees it now: limits of its container and what others use included."""
        ...

    def measure_peak(self) -> AbstractContextManager[PeakMemory]:
        """How much memory a piece of work needs at its worst moment."""
        ...

    def set_threads(self, num_threads: int, processors: Sequence[int] | None = None) -> None:
        """Threads that one operator may use on the host, each on its processor if any are named."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what was asked."""
        ...

    def is_beyond_repair(self, error: BaseException) -> bool:
        """Whether nothing can be computed in this process any more after such an error."""
        ...

    def graph_device(self) -> GraphDevice | None:
        """What captures steps as graphs, where the device has them."""
        ...

    def copy_lane(self) -> CopyLane | None:
        """What swaps beside what is computed, where the device has a stream for that."""
        ...

    def release_memory(self) -> None:
        """Gives back what is kept in reserve, because something did not fit."""
        ...


def dtype_by_name(name: str, supported: tuple[torch.dtype, ...], where: str) -> torch.dtype:
    """The type of this name, if it is among the supported ones."""
    dtype = _DTYPES.get(name)
    if dtype is None or dtype not in supported:
        names = [known for known, value in _DTYPES.items() if value in supported]
        raise OptionError(f"dtype={name}: {where} computes in {', '.join(names)}. Choose one of them.")
    return dtype

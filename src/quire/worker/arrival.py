"""How numbers of the host come to the kernels of a device: copied, or read where they lie (UVA, 4.6.2).

A GPU reads pinned memory of its host in place. For what one kernel reads once that saves a copy before it; what is read
again and again would come over the bus each time, and is copied.

Owns memory that is read in place, until the device has passed a mark behind whatever reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.worker.staging import SENT_TO_DEVICE, Array, to_device


class Arrival(Protocol):
    """A way."""

    def bring(self, arrays: Sequence[Array]) -> list[Tensor]:
        """What kernels are given of these arrays, which stay as they are until `end`."""
        ...

    def end(self) -> None:
        """All that reads what was brought has been launched."""
        ...


class Mark(Protocol):
    """A place among what the device was asked for."""

    def is_passed(self) -> bool: ...


class Copied:
    """To a device's own memory; on a CPU, memory is shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bring(self, arrays: Sequence[Array]) -> list[Tensor]:
        return to_device(arrays, self._device)

    def end(self) -> None:
        """Copies belong to the device."""


class ReadInPlace:
    """In pinned memory of the host."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._brought: list[Tensor] = []
        self._read: deque[tuple[Mark, list[Tensor]]] = deque()

    def bring(self, arrays: Sequence[Array]) -> list[Tensor]:
        while self._read and self._read[0][0].is_passed():
            self._read.popleft()
        tensors = [torch.from_numpy(array).pin_memory() for array in arrays]
        SENT_TO_DEVICE.num_bytes += sum(array.nbytes for array in arrays)
        self._brought += tensors
        return tensors

    def end(self) -> None:
        if self._brought:
            self._read.append((self._mark(), self._brought))
            self._brought = []

    @property
    def num_kept(self) -> int:
        """Arrays that the device may still read."""
        return sum(len(tensors) for _, tensors in self._read) + len(self._brought)


class CudaMark:
    """On the stream that is current."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def is_passed(self) -> bool:
        return self.event.query()


def arrival_for_one_kernel(device: torch.device) -> Arrival:
    """Of numbers that are read once."""
    return ReadInPlace(CudaMark) if device.type == "cuda" else Copied(device)

"""Swap space: room on the host for blocks of preempted sequences (3.4.5).

Owns the memory of host blocks. Must never decide which of them is free; that is the core's KV cache manager. What kind
of memory it is makes the only difference between devices (`host_memory.py`). Called by KVCache.

A block on the host has the parts that it has on the device, one for each tensor of the cache, but here they lie side by
side: swap space that is hardly used then touches few pages, and a block in a file is one piece.

    device   tensor 0  | block 0 | block 1 | ...            host   | tensor 0, tensor 1, ... of host block 0 |
             tensor 1  | block 0 | block 1 | ...                   | tensor 0, tensor 1, ... of host block 1 |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker import kernels
from quire.worker.host_memory import HostMemory

# Parts begin at cache lines.
_ALIGNMENT = 64
# What is moved to find out how long it takes: enough for more than one copy, little enough for a few milliseconds.
_MEASURED_BYTES = 8 << 20
_MEASURED_BLOCKS = 8
_MEASURED_ROUNDS = 3


class SwapArena:
    """Host blocks for the tensors of a cache, which may be on any device."""

    def __init__(self, device_tensors: Sequence[Tensor], num_blocks: int, memory: HostMemory) -> None:
        self._device_tensors = list(device_tensors)
        self._memory = memory
        self.num_blocks = num_blocks
        sizes = [_block_bytes(tensor) for tensor in self._device_tensors]
        self.block_bytes = sum(_aligned(size) for size in sizes)
        self.num_bytes = self.block_bytes * num_blocks
        # None of no size: swap space that nobody wants touches neither memory nor disk.
        self._bytes = memory.allocate(self.num_bytes) if self.num_bytes else torch.empty(0, dtype=torch.uint8)
        self.tensors = self._parts()

    def swap_out(self, pairs: IntArray) -> None:
        """Columns (block, host block): all of a step at once. The blocks on the device keep what they hold."""
        self._move(self._device_tensors, self.tensors, pairs)

    def swap_in(self, pairs: IntArray) -> None:
        """Columns (host block, block): all of a step at once."""
        self._move(self.tensors, self._device_tensors, pairs)

    def measure(self, synchronize: Callable[[], None]) -> float:
        """Seconds that a block takes in one direction; 0.0 if there are no host blocks.

        Both sides are scratch memory of the same kinds, so that nothing is changed and no page of a large cache is
        committed for this. On a CPU it stays in the processor's cache, so the figure is what moving takes at best.
        """
        count = self._num_measured()
        if count == 0:
            return 0.0
        tensors = [tensor.new_zeros((count, *tensor.shape[1:])) for tensor in self._device_tensors]
        scratch = SwapArena(tensors, count, self._memory)
        pairs = np.tile(np.arange(count), (2, 1))
        # The first round touches the pages.
        rounds = [_seconds_for(scratch, pairs, synchronize) for _ in range(1 + _MEASURED_ROUNDS)]
        return min(rounds[1:]) / (2 * count)

    def _num_measured(self) -> int:
        if self.num_bytes == 0 or len(self._device_tensors[0]) == 0:
            return 0
        fitting = min(_MEASURED_BLOCKS, max(1, _MEASURED_BYTES // self.block_bytes))
        return min(fitting, self.num_blocks, len(self._device_tensors[0]))

    def _parts(self) -> list[Tensor]:
        parts = []
        start = 0
        for tensor in self._device_tensors:
            shape = tensor.shape[1:]
            size = tensor.element_size()
            strides = (self.block_bytes // size, *torch.empty(shape, device="meta").stride())
            part = self._bytes.view(tensor.dtype).as_strided((self.num_blocks, *shape), strides, start // size)
            parts.append(part)
            start += _aligned(_block_bytes(tensor))
        return parts

    @staticmethod
    def _move(sources: list[Tensor], destinations: list[Tensor], pairs: IntArray) -> None:
        if pairs.size and sources:
            kernels.move_blocks(sources, destinations, torch.from_numpy(np.ascontiguousarray(pairs.T)))


def _seconds_for(arena: SwapArena, pairs: IntArray, synchronize: Callable[[], None]) -> float:
    """Out and in."""
    synchronize()
    start = time.perf_counter()
    arena.swap_out(pairs)
    arena.swap_in(pairs)
    synchronize()
    return time.perf_counter() - start


def _block_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

"""The tensors of the KV cache: allocation, binding to attention layers, block copies, swap space.

Owns the memory. Must never decide which block belongs to whom; that is the core's KV cache manager. Called by Worker
(once) and ModelRunner (block copies, swaps).

One pool of blocks serves all groups, and a block id belongs to one group at a time. So layer i of every group shares
tensor i, and a model with 10 layers in each of two groups keeps 10 tensors, not 20:

               group 0     group 1                        tensor i, layout of one block
    tensor 0   layer 0     layer 10         keys    [num_kv_heads, block_size, head_dim]
    tensor 1   layer 1     layer 11         values  [num_kv_heads, block_size, value_dim]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.errors import CapacityError
from quire.messages import IntArray
from quire.worker import kernels
from quire.worker.attention import Attention
from quire.worker.host_memory import HostMemory, OrdinaryMemory
from quire.worker.lazy_memory import lazy_zeros
from quire.worker.swap_arena import SwapArena


class KVCache:
    """Key and value tensors [num_blocks, num_kv_heads, block_size, dim], a pair for each place in the groups."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.swap_arena = SwapArena((), 0, OrdinaryMemory())

    def allocate(
        self,
        layers: dict[str, Attention],
        groups: Sequence[Sequence[str]],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate and bind. Layers at the same place of their groups must have the same shape."""
        unknown = {name for names in groups for name in names} ^ set(layers)
        if unknown:
            raise ValueError(f"KV cache: groups and the model differ in layers {sorted(unknown)}")
        for place in range(max((len(names) for names in groups), default=0)):
            sharing = [(group, layers[names[place]]) for group, names in enumerate(groups) if place < len(names)]
            shapes = {(layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.dtype) for _, layer in sharing}
            if len(shapes) > 1:
                raise ValueError(f"KV cache: layers of different shapes share a tensor: {sorted(map(str, shapes))}")
            num_kv_heads, head_dim, value_dim, dtype = shapes.pop()
            key, value = (
                _zeros((num_blocks, num_kv_heads, block_size, dim), dtype, device) for dim in (head_dim, value_dim)
            )
            self.tensors += (key, value)
            for group, layer in sharing:
                layer.bind(group, key, value)

    def open_swap_space(self, num_host_blocks: int, memory: HostMemory) -> None:
        """Room for so many blocks of all tensors on the host; called once, after `allocate`."""
        self.swap_arena = SwapArena(self.tensors, num_host_blocks, memory)

    def swap(self, swapped_out: IntArray, swapped_in: IntArray) -> None:
        """Columns (block, host block) and (host block, block). First out: what leaves makes room for what comes."""
        self.swap_arena.swap_out(swapped_out)
        self.swap_arena.swap_in(swapped_in)

    def copy_blocks(self, pairs: IntArray) -> None:
        """Columns (source, destination): all copies of a step in one call."""
        if pairs.size and self.tensors:
            kernels.copy_blocks(self.tensors, torch.from_numpy(np.ascontiguousarray(pairs.T)))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # Pages are committed when the first token is written there, so a large cache costs no time at start.
        memory = lazy_zeros((num_bytes,), np.uint8, use_huge_pages=True)
        return torch.from_numpy(memory).view(dtype).view(shape)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(
            f"KV cache: {num_bytes / 2**30:.2f} GiB for one layer could not be allocated ({error}). "
            "Lower kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization."
        ) from error

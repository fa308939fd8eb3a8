"""The tensors of the KV cache: allocation, binding to attention layers, block copies, swap space.

Owns the memory. Must never decide which block belongs to whom; that is the core's KV cache manager. Called by Worker
(once) and ModelRunner (block copies, swaps).

One pool of blocks serves all groups, and a block id belongs to one group at a time. So layer i of every group shares
tensor i, and a model with 10 layers in each of two groups keeps 10 tensors, not 20. Layers of another shape, which a
draft brings, are counted for themselves and have tensors of their own, over the same block ids:

               group 0     group 1              tensor i, layout of one block
    tensor 0   layer 0     layer 10             head 0: keys [block_size, head_dim], values [block_size, value_dim]
    tensor 1   layer 1     layer 11             head 1: keys, values                                           ...

What attention reads one after the other lies side by side, so that memory is read in long runs. A layer's caches are
two views of its tensor. What a key or a value is kept as: `kernels/cache_format.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.errors import CapacityError
from quire.messages import IntArray
from quire.state_layout import StateLayout, state_layout
from quire.worker import kernels
from quire.worker.attention import Attention
from quire.worker.host_memory import HostMemory, OrdinaryMemory
from quire.worker.kernels.cache_format import has_scales, row_elements
from quire.worker.lazy_memory import commit_ahead, lazy_zeros
from quire.worker.state_cache import StatefulLayer
from quire.worker.swap_arena import SwapArena

# Of the cache on a CPU, what is committed before it is needed. Blocks are handed out from the first one on.
_COMMIT_AHEAD_BYTES = 512 << 20

# heads of keys and values, size of a key, size of a value (0: a part of its key), type
Shape: TypeAlias = tuple[int, int, int, torch.dtype]


class KVCache:
    """A tensor [num_blocks, num_kv_heads, ...] for each place in the groups."""

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
        states: Mapping[str, StatefulLayer] | None = None,
    ) -> None:
        """Allocate and bind. Layers with `states` form the last group."""
        states = states or {}
        unknown = {name for names in groups for name in names} ^ (set(layers) | set(states))
        if unknown:
            raise ValueError(f"KV cache: groups and the model differ in layers {sorted(unknown)}")
        # (shape of a layer, how many of this shape come before it in its group) -> its tensor, keys, values
        by_place: dict[tuple[Shape, int], tuple[Tensor, Tensor, Tensor]] = {}
        for group, names in enumerate(groups[: len(groups) - bool(states)]):
            num_before: Counter[Shape] = Counter()
            for name in names:
                layer = layers[name]
                spec = layer.spec
                shape = (spec.num_kv_heads, spec.key_dim, spec.value_dim, layer.cache_dtype)
                place = shape, num_before[shape]
                num_before[shape] += 1
                if place not in by_place:
                    tensor = _zeros(shape, num_blocks, block_size, device)
                    by_place[place] = tensor, *_key_and_value(tensor, shape, block_size)
                layer.bind(group, *by_place[place][1:])
        specs = [layer.spec for layer in layers.values()] + [layer.spec for layer in states.values()]
        layout = state_layout(specs, block_size)
        self._bind_states(layout, states, by_place, num_blocks, device)
        # Codes and scales are bytes to all that move blocks.
        self.tensors += (
            tensor.view(torch.uint8) if has_scales(tensor.dtype) else tensor for tensor, _, _ in by_place.values()
        )
        if device.type == "cpu":
            arrays = [tensor.view(torch.uint8).flatten().numpy() for tensor in self.tensors]
            commit_ahead(arrays, _COMMIT_AHEAD_BYTES)

    def _bind_states(
        self,
        layout: StateLayout | None,
        states: Mapping[str, StatefulLayer],
        by_place: Mapping[tuple[Shape, int], tuple[Tensor, Tensor, Tensor]],
        num_blocks: int,
        device: torch.device,
    ) -> None:
        """States lie in the blocks of the first shape of attention, without attention in tensors of their own."""
        if layout is None:
            return
        if by_place:
            shape = next(iter(by_place))[0]
            tensors = [tensor for (other, _), (tensor, _, _) in by_place.items() if other == shape]
        else:
            tensors = [
                _zeros_of((num_blocks, layout.chunk_bytes), torch.uint8, device) for _ in range(layout.num_places)
            ]
            self.tensors += tensors
        places = [tensor.view(num_blocks, -1).view(torch.uint8) for tensor in tensors[: layout.num_places]]
        if len(places) < layout.num_places or places[0].shape[1] != layout.chunk_bytes:
            raise ValueError(f"KV cache: its blocks are not those that states were planned for ({layout})")
        for layer in states.values():
            layer.bind(layout, places)

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


def _key_and_value(tensor: Tensor, shape: Shape, block_size: int) -> tuple[Tensor, Tensor]:
    """Views [num_blocks, num_kv_heads, block_size, *] of a layer's tensor; the same one where values are in keys."""
    _, head_dim, value_dim, dtype = shape
    num_key_elements = block_size * row_elements(head_dim, dtype)
    keys = tensor[..., :num_key_elements].unflatten(-1, (block_size, -1))
    if not value_dim:
        return keys, keys
    return keys, tensor[..., num_key_elements:].unflatten(-1, (block_size, -1))


def _zeros(shape: Shape, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    num_kv_heads, head_dim, value_dim, dtype = shape
    width = block_size * sum(row_elements(dim, dtype) for dim in (head_dim, value_dim) if dim)
    return _zeros_of((num_blocks, num_kv_heads, width), dtype, device)


def _zeros_of(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = math.prod(sizes) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(sizes, dtype=dtype, device=device)
        # Pages are committed when the first token is written there, so a large cache costs no time at start.
        memory = lazy_zeros((num_bytes,), np.uint8, use_huge_pages=True)
        return torch.from_numpy(memory).view(dtype).view(sizes)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(
            f"KV cache: {num_bytes / 2**30:.2f} GiB for one layer could not be allocated ({error}). "
            "Lower kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization."
        ) from error

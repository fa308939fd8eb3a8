"""The tensors of the KV cache: allocation, binding to attention layers, block copies, swap space.

Owns the memory. Must never decide which block belongs to whom; that is the core's KV cache manager. Called by Worker
(once) and ModelRunner (block copies, swaps).

One pool of blocks serves all groups, and a block id belongs to one group at a time. The layers of a group lie in a
block one after the other, each with as many bytes as it keeps of block_size tokens. The memory of all blocks is cut
into tensors where no layer of any group lies across, so that layer i of every group shares tensor i if all are alike,
and a model with 10 layers in each of two groups keeps 10 tensors, not 20:

               group 0     group 1              a layer's bytes of one block
    tensor 0   layer 0     layers 3 and 4       head 0: keys [block_size, head_dim], values [block_size, value_dim]
    tensor 1   layer 1     layers 5 and 6       head 1: keys, values                                           ...
    tensor 2   layer 2     (stays empty)

What attention reads one after the other lies side by side, so that memory is read in long runs. A layer's caches are
two views of its tensor. What a key or a value is kept as: `kernels/cache_format.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import CapacityError
from quire.messages import IntArray
from quire.state_layout import StateLayout, state_layout
from quire.worker import kernels
from quire.worker.attention import Attention
from quire.worker.copy_lane import CopiesUnderWay, CopyLane
from quire.worker.host_memory import HostMemory, OrdinaryMemory
from quire.worker.kernels.cache_format import row_elements
from quire.worker.lazy_memory import commit_ahead, give_back, lazy_zeros, resident_bytes
from quire.worker.state_cache import StatefulLayer
from quire.worker.swap_arena import SwapArena

# Of the cache on a CPU, what is committed before it is needed. Blocks are handed out from the first one on.
_COMMIT_AHEAD_BYTES = 512 << 20
# heads of keys and values, size of a key, size of a value (0: a part of its key), type
Shape: TypeAlias = tuple[int, int, int, torch.dtype]


class KVCache:
    """Tensors of bytes, [num_blocks, bytes of a block]."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.swap_arena = SwapArena((), 0, OrdinaryMemory())
        self.copies = CopiesUnderWay()
        # blocks whose memory is there before anybody uses them
        self._num_committed = 0

    def allocate(
        self,
        layers: dict[str, Attention],
        groups: Sequence[Sequence[str]],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        states: Mapping[str, StatefulLayer] | None = None,
        num_state_blocks: int = 0,
    ) -> None:
        """Allocate and bind. Layers with `states` form the last group; `num_state_blocks`: as of `state_layout`."""
        states = states or {}
        unknown = {name for names in groups for name in names} ^ (set(layers) | set(states))
        if unknown:
            raise ValueError(f"KV cache: groups and the model differ in layers {sorted(unknown)}")
        of_attention = [[layers[name] for name in names] for names in groups[: len(groups) - bool(states)]]
        sizes = [[layer.spec.bytes_per_token * block_size for layer in members] for members in of_attention]
        starts = [list(accumulate(of_group, initial=0)) for of_group in sizes]
        cuts = _common_cuts(starts)
        self.tensors += (_zeros(num_blocks, end - begin, device) for begin, end in pairwise(cuts))
        views: dict[tuple[int, Shape], tuple[Tensor, Tensor]] = {}
        for group, members in enumerate(of_attention):
            for layer, start in zip(members, starts[group], strict=False):
                place = start, _shape_of(layer)
                if place not in views:
                    index = bisect_right(cuts, start) - 1
                    views[place] = _key_and_value(self.tensors[index], start - cuts[index], layer, block_size)
                layer.bind(group, *views[place])
        specs = [layer.spec for layer in layers.values()] + [layer.spec for layer in states.values()]
        layout = state_layout(specs, groups, block_size, num_state_blocks)
        if layout is not None:
            of_target = any(not layer.spec.is_draft for layer in layers.values())
            first = 0 if of_target else len(self.tensors)
            self._bind_states(layout, states, num_blocks, device, first)
        if device.type == "cpu" and self.tensors:
            self._num_committed = -(-_COMMIT_AHEAD_BYTES // sum(tensor.shape[1] for tensor in self.tensors))
            commit_ahead([_bytes_of(tensor[: self._num_committed]) for tensor in self.tensors])

    def _bind_states(
        self,
        layout: StateLayout,
        states: Mapping[str, StatefulLayer],
        num_blocks: int,
        device: torch.device,
        first: int,
    ) -> None:
        """States lie in the tensors of the target's attention, which are those from `first` on; what has no room there
        in tensors of its own."""
        num_more = first + layout.num_places - len(self.tensors)
        self.tensors += [_zeros(num_blocks, layout.chunk_bytes, device) for _ in range(num_more)]
        places = self.tensors[first : first + layout.num_places]
        if len(places) < layout.num_places or any(place.shape[1] != layout.chunk_bytes for place in places):
            raise ValueError(f"KV cache: its blocks are not those that states were planned for ({layout})")
        for layer in states.values():
            layer.bind(layout, places)

    def open_swap_space(self, num_host_blocks: int, memory: HostMemory, lane: CopyLane | None = None) -> None:
        """Room for so many blocks of all tensors on the host; called once, after `allocate`. With a lane, whoever uses
        blocks says so before (`copies`)."""
        self.swap_arena = SwapArena(self.tensors, num_host_blocks, memory)
        num_blocks = len(self.tensors[0]) if self.tensors else 0
        self.copies = CopiesUnderWay(lane, num_blocks)

    def swap(self, swapped_out: IntArray, swapped_in: IntArray) -> None:
        """Columns (block, host block) and (host block, block). First out: what leaves makes room for what comes."""

        def swap() -> None:
            self.swap_arena.swap_out(swapped_out)
            self.swap_arena.swap_in(swapped_in)

        self.copies.run(swap, np.concatenate([swapped_out[0], swapped_in[1]]))

    def copy_blocks(self, pairs: IntArray) -> None:
        """Columns (source, destination): all copies of a step in one call."""
        if pairs.size and self.tensors:
            self.copies.before_use(pairs.reshape(-1))
            kernels.copy_blocks(self.tensors, torch.from_numpy(np.array(pairs.T, order="C")))

    def give_back(self, first: int, end: int) -> None:
        """On a CPU: blocks [first, end) hold nothing; their memory goes back to the system until they are written. What
        was committed ahead stays."""
        first = max(first, self._num_committed)
        for tensor in self.tensors:
            give_back(_bytes_of(tensor[first:end]))

    @property
    def num_resident_bytes(self) -> int:
        """On a CPU: what of it is in memory."""
        return sum(resident_bytes(_bytes_of(tensor)) for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def _common_cuts(starts: Sequence[Sequence[int]]) -> list[int]:
    """Where a layer of some group begins or ends, and none lies across; in bytes of a block."""
    places = sorted({start for of_group in starts for start in of_group})
    return [place for place in places if all(place in of_group or place > of_group[-1] for of_group in starts)]


def _shape_of(layer: Attention) -> Shape:
    return layer.num_kv_heads, layer.head_dim, layer.spec.value_dim, layer.cache_dtype


def _key_and_value(tensor: Tensor, start: int, layer: Attention, block_size: int) -> tuple[Tensor, Tensor]:
    """Views [num_blocks, num_kv_heads, block_size, *] of a layer's bytes; the same one where values are in keys."""
    num_kv_heads, head_dim, value_dim, dtype = _shape_of(layer)
    num_bytes = layer.spec.bytes_per_token * block_size
    heads = tensor[:, start : start + num_bytes].view(dtype).unflatten(1, (num_kv_heads, -1))
    num_key_elements = block_size * row_elements(head_dim, dtype)
    keys = heads[..., :num_key_elements].unflatten(-1, (block_size, -1))
    if not value_dim:
        return keys, keys
    return keys, heads[..., num_key_elements:].unflatten(-1, (block_size, -1))


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.flatten().numpy()


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    num_bytes = num_blocks * block_bytes
    try:
        if device.type != "cpu":
            return torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)
        # Pages are committed when the first token is written there, so a large cache costs no time at start.
        memory = lazy_zeros((num_bytes,), np.uint8, use_huge_pages=True)
        return torch.from_numpy(memory).view(num_blocks, block_bytes)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(
            f"KV cache: {num_bytes / 2**30:.2f} GiB for one layer could not be allocated ({error}). "
            "Lower kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization."
        ) from error

"""Adapters (LoRA) on a linear layer: the thin matrices of all that are in a slot, added to the layer's output.

A layer that has none carries `NO_ADAPTERS`. Which slot a token uses stands in the forward context, so that models know
nothing of adapters. The weight itself stays as it is, whatever its form: what is added comes behind it.

Owns the slots of one layer; who is in which slot is decided elsewhere (`worker/adapter_slots.py`). An adapter is packed
when it is loaded, so that to fill a slot is a copy. Memory stays where it is: a recorded program knows addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.worker import kernels
from quire.worker.forward_context import current_forward_context
from quire.worker.staging import send


class LowRank(NamedTuple):
    """What an adapter has for a part of a layer: a [rank, inputs] and b [outputs, rank], its scale included."""

    a: Tensor
    b: Tensor


class Adds(Protocol):
    """What a linear layer asks."""

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """y, the layer's output for x, with what the adapters of its rows add."""


class NoAdapters:
    """Of a layer that has no slots."""

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        return y


NO_ADAPTERS = NoAdapters()


class PackedAdapter(NamedTuple):
    """What an adapter has for a layer, as it lies in a slot."""

    rank: int
    a: Tensor
    b: Tensor


class AdapterStack:
    """The slots of one layer; `parts` are the outputs of the layers that it is merged of."""

    def __init__(self, max_rank: int, in_features: int, parts: list[int], dtype: torch.dtype) -> None:
        self.parts = parts
        self.in_features = in_features
        self._max_rank = max_rank
        self._format = kernels.AdapterFormat(in_features, tuple(parts), dtype)

    @property
    def elements_of_slot(self) -> int:
        return sum(self._format.sizes(self._max_rank))

    def place(self, memory: Tensor) -> None:
        """The slots get their memory: zeros, elements_of_slot for each. Before the first of them is filled."""
        num_slots = len(memory) // self.elements_of_slot
        size_of_a, size_of_b = self._format.sizes(self._max_rank)
        a, b = memory.split([num_slots * size_of_a, num_slots * size_of_b])
        self._a = a.view(num_slots, size_of_a)
        self._b = b.view(num_slots, size_of_b)
        self._ranks = torch.zeros(num_slots, dtype=torch.int32, device=memory.device)

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        slots = current_forward_context().adapter_slots
        if slots is not None:
            kernels.add_adapters(y, x, slots, self._ranks, self._a, self._b, self.parts, self._max_rank)
        return y

    def pack(self, pieces: Mapping[int, LowRank]) -> PackedAdapter:
        """Parts that there is no piece for add nothing; the others may differ in rank."""
        rank = max(len(piece.a) for piece in pieces.values())
        some = next(iter(pieces.values())).a
        a = [some.new_zeros((rank, self.in_features)) for _ in self.parts]
        b = [some.new_zeros((part, rank)) for part in self.parts]
        for part, piece in pieces.items():
            own = len(piece.a)
            a[part][:own] = piece.a
            b[part][:, :own] = piece.b
        return PackedAdapter(rank, *self._format.pack(a, b))

    @property
    def slots(self) -> Tensor:
        """The memory of all a matrices: what an operator knows the slots by."""
        return self._a

    def fill(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Another adapter takes the slot, or one that has nothing for this layer. Nothing waits for a device: a single
        number that is assigned to a place would."""
        self._ranks[slot].fill_(0)
        if adapter is not None:
            self._a[slot, : len(adapter.a)] = send(adapter.a, self._a.device)
            self._b[slot, : len(adapter.b)] = send(adapter.b, self._b.device)
            self._ranks[slot].fill_(adapter.rank)

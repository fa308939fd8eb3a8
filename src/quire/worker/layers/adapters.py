"""Adapters (LoRA) on a linear layer: the thin matrices of all that are in a slot, added to the layer's output.

A layer that has none carries `NO_ADAPTERS`. Which slot a token uses stands in the forward context, so that models know
nothing of adapters. The weight itself stays as it is, whatever its form: what is added comes behind it.

    a [slots, parts, rank, inputs]      b [slots, rank, outputs]      ranks [slots]

Owns the slots of one layer; who is in which slot is decided elsewhere (`worker/adapter_slots.py`). Memory stays where
it is, because a recorded program knows addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.worker import kernels
from quire.worker.forward_context import current_forward_context


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


class AdapterStack:
    """The slots of one layer; `parts` are the outputs of the layers that it is merged of."""

    def __init__(self, num_slots: int, max_rank: int, in_features: int, parts: list[int], like: Tensor) -> None:
        self.parts = parts
        self.in_features = in_features
        self._a = torch.zeros((num_slots, len(parts), max_rank, in_features), dtype=like.dtype, device=like.device)
        self._b = torch.zeros((num_slots, max_rank, sum(parts)), dtype=like.dtype, device=like.device)
        self._ranks = torch.zeros(num_slots, dtype=torch.int32, device=like.device)

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        slots = current_forward_context().adapter_slots
        if slots is not None:
            kernels.add_adapters(y, x, slots, self._ranks, self._a, self._b, self.parts)
        return y

    def fill(self, slot: int, pieces: Mapping[int, LowRank]) -> None:
        """Another adapter takes the slot; parts that it has nothing for add nothing."""
        rank = max((len(piece.a) for piece in pieces.values()), default=0)
        self._ranks[slot] = rank
        self._a[slot, :, :rank] = 0
        self._b[slot, :rank] = 0
        for part, piece in pieces.items():
            own = len(piece.a)
            start = sum(self.parts[:part])
            self._a[slot, part, :own] = piece.a
            self._b[slot, :own, start : start + self.parts[part]] = piece.b.t()

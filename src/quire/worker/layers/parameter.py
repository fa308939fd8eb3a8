"""A parameter that knows how to load its own shard, so that models and the loader need not.

`load_weight(parameter, tensor, part)` takes a tensor of the checkpoint, whole and in the checkpoint's own type, picks
this rank's piece and puts it where it belongs. `part` names the piece of a merged parameter ("q", "k", 0, 1, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

Part: TypeAlias = str | int | None
# (parameter, tensor of the checkpoint, part) -> (place inside the parameter, piece of the tensor)
PickShard: TypeAlias = Callable[[Tensor, Tensor, Part], tuple[Tensor, Tensor]]


class ShapeMismatchError(ValueError):
    """The checkpoint's tensor does not fit; the loader turns it into a ModelError with the names."""


def make_parameter(*shape: int, pick: PickShard | None = None, parts: tuple[Part, ...] = (None,)) -> nn.Parameter:
    """An uninitialised parameter in torch's default type and device. `parts` are the pieces that fill it."""
    parameter = nn.Parameter(torch.empty(*shape), requires_grad=False)
    parameter.quire_pick = pick
    parameter.quire_parts = parts
    return parameter


def parts_of(parameter: Tensor) -> tuple[Part, ...]:
    """The pieces that must be loaded before a parameter is whole."""
    return getattr(parameter, "quire_parts", (None,))


def load_weight(parameter: Tensor, tensor: Tensor, part: Part = None) -> None:
    """Put a tensor of the checkpoint (or this rank's piece of it) in its place, converting its type."""
    pick: PickShard | None = getattr(parameter, "quire_pick", None)
    place, piece = pick(parameter.data, tensor, part) if pick is not None else (parameter.data, tensor)
    if place.shape != piece.shape:
        raise ShapeMismatchError(f"{list(tensor.shape)} in the checkpoint, {list(place.shape)} in the model")
    place.copy_(piece)

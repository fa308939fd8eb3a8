"""A parameter that knows how to load its own shard, so that models and the loader need not.

`load_weight(parameter, weight, part)` takes a weight of the checkpoint, whole and in the checkpoint's own type, picks
this rank's piece and puts it where it belongs. `part` names the piece of a merged parameter ("q", "k", 0, 1, ...).
A quantised piece has no place in a parameter of floats: it waits beside it until all pieces are there and the layer
takes them (`take_quantized`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quire.worker.layers.quantization import QuantizedWeight, concatenate

Part: TypeAlias = str | int | None
# (parameter, weight of the checkpoint, part) -> (place inside the parameter, piece of the weight). A quantised weight
# can be narrowed as a tensor can, so that one picks from both.
PickShard: TypeAlias = Callable[[Tensor, Any, Part], tuple[Tensor, Any]]


class ShapeMismatchError(ValueError):
    """The checkpoint's weight does not fit; the loader turns it into a ModelError with the names."""


def make_parameter(
    *shape: int,
    pick: PickShard | None = None,
    parts: tuple[Part, ...] = (None,),
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """An uninitialised parameter on torch's default device, in its default type or `dtype`. `parts` are the pieces that
    fill it."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    parameter.quire_pick = pick
    parameter.quire_parts = parts
    return parameter


def parameter_like(parameter: Tensor, device: torch.device | None = None) -> nn.Parameter:
    """Another one, uninitialised, that loads the same pieces."""
    other = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
    other.quire_pick = getattr(parameter, "quire_pick", None)
    other.quire_parts = parts_of(parameter)
    return other


def parts_of(parameter: Tensor) -> tuple[Part, ...]:
    """The pieces that must be loaded before a parameter is whole."""
    return getattr(parameter, "quire_parts", (None,))


def load_weight(parameter: Tensor, weight: Tensor | QuantizedWeight, part: Part = None) -> None:
    """Put a weight of the checkpoint (or this rank's piece of it) in its place, converting its type."""
    put(parameter, *pick_piece(parameter, weight, part))


def pick_piece(parameter: Tensor, weight: Any, part: Part = None) -> tuple[Tensor, Any]:
    """The place of a weight of the checkpoint inside the parameter, and the piece of it that this rank keeps."""
    pick: PickShard | None = getattr(parameter, "quire_pick", None)
    place, piece = pick(parameter.data, weight, part) if pick is not None else (parameter.data, weight)
    if place.shape != piece.shape:
        raise ShapeMismatchError(f"{list(weight.shape)} in the checkpoint, {list(place.shape)} in the model")
    return place, piece


def replace_weight(parameter: Tensor, weight: QuantizedWeight) -> None:
    """A whole parameter, of this rank already, in the place of its numbers."""
    put(parameter, parameter.data, weight)


def put(parameter: Tensor, place: Tensor, piece: Tensor | QuantizedWeight) -> None:
    """A piece in its place, or if it is quantised beside it."""
    if isinstance(piece, QuantizedWeight):
        waiting: list[tuple[Tensor, QuantizedWeight]] = getattr(parameter, "quire_quantized", [])
        parameter.quire_quantized = [*waiting, (place, piece)]
    else:
        place.copy_(piece)


def take_quantized(parameter: Tensor) -> QuantizedWeight | None:
    """The pieces that wait, as one weight. None if there are none, or if floats came for some rows of the parameter:
    then the others become floats too."""
    waiting: list[tuple[Tensor, QuantizedWeight]] = getattr(parameter, "quire_quantized", [])
    parameter.quire_quantized = []
    if not waiting:
        return None
    if sum(piece.shape[0] for _, piece in waiting) != parameter.shape[0]:
        for place, piece in waiting:
            place.copy_(piece.dequantize(place.dtype))
        return None
    waiting.sort(key=lambda entry: entry[0].storage_offset())
    return concatenate([piece for _, piece in waiting])


def dequantize_waiting(parameter: Tensor) -> None:
    """Floats after all: for a layer that cannot multiply codes."""
    for place, piece in getattr(parameter, "quire_quantized", []):
        place.copy_(piece.dequantize(place.dtype))
    parameter.quire_quantized = []

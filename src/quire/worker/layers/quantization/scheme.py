"""What a way of quantising at load is, and which there are (option `quantization`).

One file a scheme in this folder, or an entry point of the group `quire.quantization` (name = object) in another
package. A scheme says how a float weight becomes codes, and for which weights it is worth it. A weight that comes
quantised keeps its codes where they have no more bits than the scheme would give it; then the scheme says only whether
inputs are rounded too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from quire.config.quantization import ENTRY_POINT_GROUP, SCHEMES
from quire.errors import ModelError, OptionError, one_line
from quire.worker.layers.quantization.quantized_weight import QuantizedWeight

# What a weight does in a model. Embeddings are looked up, not multiplied: their rows stay as they are.
Role: TypeAlias = Literal["linear", "head", "embedding"]
# A layer of fewer weights costs more in conversions than it saves in bytes.
_LEAST_WEIGHTS = 2**12
# Codes are multiplied in words of four.
_WORD = 4


class Scheme(Protocol):
    """Bits of a linear layer's and of the head's codes, and what is done to inputs (see QuantizedWeight)."""

    name: str
    bits: int
    head_bits: int
    weight_only: bool

    def quantize(self, weight_NK: Tensor, role: Role) -> QuantizedWeight | None:
        """Codes for a float weight; None if it is to stay as it is. Each row by itself: ranks may have some of them."""
        ...


def find_scheme(name: str) -> Scheme:
    """The scheme of this name, from this folder or from another package."""
    if name in SCHEMES:
        found: Scheme = importlib.import_module(f"{__package__}.{name}").SCHEME
        return found
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            try:
                found = point.load()
            except Exception as error:
                raise OptionError(
                    f"quantization={name}: the package that brings it cannot be imported ({one_line(error)})."
                ) from error
            return found
    raise OptionError(f"quantization={name}: there is no such scheme.")


def is_worth_it(shape_NK: Sequence[int]) -> bool:
    """Whether a weight is large enough, and of a width that can be cut into words."""
    return shape_NK[0] * shape_NK[1] >= _LEAST_WEIGHTS and shape_NK[1] % _WORD == 0


def keeps_codes(scheme: Scheme, weight: Tensor | QuantizedWeight, role: Role) -> bool:
    """Whether a weight that comes quantised stays so."""
    wanted = scheme.head_bits if role == "head" else scheme.bits
    return isinstance(weight, QuantizedWeight) and (role == "embedding" or weight.bits <= wanted)


def apply(
    scheme: Scheme, weight: Tensor | QuantizedWeight, role: Role, name: str, whole: Sequence[int] | None = None
) -> Tensor | QuantizedWeight:
    """What a layer keeps of a weight of the checkpoint, or of some rows of one of the shape `whole`. Embeddings alone
    are never quantised here."""
    if isinstance(weight, QuantizedWeight):
        if keeps_codes(scheme, weight, role):
            return replace(weight, weight_only=scheme.weight_only)
        weight = weight.dequantize(torch.float32)
    if role == "embedding" or not is_worth_it(whole or weight.shape):
        return weight
    quantized = scheme.quantize(weight, role)
    if quantized is None:
        return weight
    if not quantized.scales.isfinite().all():
        raise ModelError(f"{name}: holds infinities or NaN, which cannot be quantised. Download the checkpoint again.")
    return quantized

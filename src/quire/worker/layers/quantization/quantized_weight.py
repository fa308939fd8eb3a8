"""A weight as whole numbers with scales: what every quantised format becomes before it is packed.

    w[n, k] = scales[n, g] * values[n, k] + offsets[n, g]        g = k / (K / G)

Owns the cutting and joining of such weights, which must not change one of the numbers above. A column of scales (G = 1)
is a scale for each output. Shape suffixes: N outputs (rows), K inputs (columns), G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.worker.layers.quantization.by_rows import by_rows

# What the packed layouts hold: groups of 4-bit codes, and the narrowest group of those of more bits.
_GROUPS_OF_4_BITS = (32, 64, 128)
_LEAST_GROUP = {4: 32, 6: 16, 8: 16}
# An offset of more steps than this has a last bit that is wider than all codes of 4 bits.
_MOST_STEPS = 2.0**14


class GroupBorderError(ValueError):
    """A cut would go through the middle of a group."""


@dataclass(frozen=True)
class QuantizedWeight:
    """`bits` is 4 (values 0 to 15, uint8; or in int8 twice the values of 4-bit floats), or 6 or 8 (int8).
    `weight_only`: inputs are multiplied as they are; otherwise they are rounded to 8 bits on the way, token by token,
    which lets the processor's integer instructions work."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    weight_only: bool

    def __post_init__(self) -> None:
        assert self.bits in (4, 6, 8), "codes have 4, 6 or 8 bits"
        assert self.values.dtype == torch.int8 or (self.bits, self.values.dtype) == (4, torch.uint8), "a byte a code"
        assert self.values.ndim == self.scales.ndim == 2, "[N, K] and [N, G]"
        assert self.scales.dtype == torch.float32, "scales are float32"
        assert self.scales.shape[0] == self.values.shape[0], "a row of scales for each row"
        assert self.values.shape[1] % self.scales.shape[1] == 0, "groups divide the inputs"
        assert self.offsets is None or self.offsets.shape == self.scales.shape, "an offset for each scale"

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.num_groups

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def narrow(self, dim: int, start: int, length: int) -> QuantizedWeight:
        """Rows (dim 0) or columns (dim 1), as of a tensor: what a rank owns of a layer."""
        if dim == 0:
            return self._map(lambda tensor: tensor.narrow(0, start, length))
        # Groups become smaller, each with the scale it had, until the cut runs between two of them.
        if self.num_groups > 1:
            group = math.gcd(self.group_size, start, length)
            if group < min(_LEAST_GROUP[self.bits], self.group_size):
                raise GroupBorderError(
                    f"columns {start} to {start + length} cut through groups of {self.group_size} inputs"
                )
            fine = self.regrouped(group)
            first, count = start // group, length // group
            scales = fine.scales.narrow(1, first, count)
            offsets = None if fine.offsets is None else fine.offsets.narrow(1, first, count)
            return replace(self, values=self.values.narrow(1, start, length), scales=scales, offsets=offsets)
        return replace(self, values=self.values.narrow(1, start, length))

    def select_rows(self, index: Tensor) -> QuantizedWeight:
        """The rows of these numbers, in this order."""
        return self._map(lambda tensor: tensor.index_select(0, index))

    def to(self, device: torch.device) -> QuantizedWeight:
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, values=change(self.values), scales=change(self.scales), offsets=offsets)

    def regrouped(self, group: int) -> QuantizedWeight:
        """The same numbers with smaller groups, which divide those of now."""
        times = self.group_size // group
        if times == 1:
            return self
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, 1)
        return replace(self, scales=self.scales.repeat_interleave(times, 1), offsets=offsets)

    def widened(self, bits: int = 6) -> QuantizedWeight:
        """The same numbers as codes of at least so many bits."""
        return self if self.bits >= bits else replace(self, values=self.values.to(torch.int8), bits=bits)

    def packable(self) -> QuantizedWeight:
        """The same numbers in groups that the packed layouts hold, and no offset without a scale."""
        fitted, num_columns, group = self._with_scales(), self.shape[1], self.group_size
        if self.bits > 4 or group in (*_GROUPS_OF_4_BITS, num_columns):
            return fitted
        fitting = [size for size in _GROUPS_OF_4_BITS if group % size == 0]
        return fitted.regrouped(max(fitting)) if fitting else fitted.widened()

    def _with_scales(self) -> QuantizedWeight:
        """Groups of one number as one step of that number: layouts keep an offset as a multiple of its scale, in 11
        bits, from which steps that are far smaller than the offset vanish."""
        if self.offsets is None:
            return self
        constant = self.offsets.abs() > self.scales.abs() * _MOST_STEPS
        if not constant.any():
            return self
        columns = constant.repeat_interleave(self.group_size, 1)
        means = self.values.view(-1, self.num_groups, self.group_size).to(torch.float32).mean(2)
        scales = torch.where(constant, self.offsets + self.scales * means, self.scales)
        offsets = self.offsets.masked_fill(constant, 0.0)
        return replace(self, values=self.values.masked_fill(columns, 1), scales=scales, offsets=offsets)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K]."""
        num_rows, num_columns = self.shape
        out = torch.empty(num_rows, num_columns, dtype=dtype, device=self.values.device)

        def compute(rows: slice) -> None:
            codes = self.values[rows].to(torch.float32).view(-1, self.num_groups, self.group_size)
            weight = codes.mul_(self.scales[rows, :, None])
            if self.offsets is not None:
                weight.add_(self.offsets[rows, :, None])
            out[rows] = weight.view(-1, num_columns)

        by_rows(num_rows, num_columns, compute)
        return out


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One below the other, in the format that holds them all: query, key and value become one multiplication."""
    if len(parts) == 1:
        return parts[0]
    group = math.gcd(*[part.group_size for part in parts])
    parts = [part.regrouped(group) for part in parts]
    if len({(part.bits, part.values.dtype) for part in parts}) > 1:
        bits = max(6, *(part.bits for part in parts))
        parts = [part.widened(bits) for part in parts]
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts])
    return QuantizedWeight(
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=offsets,
        bits=parts[0].bits,
        # Inputs are rounded only if every part allows it.
        weight_only=any(part.weight_only for part in parts),
    )

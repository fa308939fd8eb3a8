"""A weight of a checkpoint that is not read yet: it can be cut as a tensor can, and then only what is left is read.

So a rank of several leaves the rest of a file alone, and does not compute what others keep. Readers of checkpoints make
them (checkpoints/); the loader reads them when the layer has picked its piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from quire.worker.layers.quantization import QuantizedWeight

# some rows and columns of a weight
ReadPart: TypeAlias = Callable[[slice, slice], Tensor | QuantizedWeight]


@dataclass(frozen=True)
class StoredWeight:
    """`nbytes`: of the whole, in the file. A format packs several numbers together, or has a scale for them: parts
    of it begin and end at multiples of `row_step` and `column_step`, or at the end."""

    rows: range | Tensor
    columns: range
    nbytes: int
    read_part: ReadPart
    whole: tuple[int, int]
    row_step: int = 1
    column_step: int = 1

    @classmethod
    def of(
        cls,
        shape: tuple[int, int] | torch.Size,
        nbytes: int,
        read_part: ReadPart,
        *,
        row_step: int = 1,
        column_step: int = 1,
    ) -> StoredWeight:
        """All of it."""
        num_rows, num_columns = shape
        whole = (num_rows, num_columns)
        return cls(range(num_rows), range(num_columns), nbytes, read_part, whole, row_step, column_step)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), len(self.columns)))

    def narrow(self, dim: int, start: int, length: int) -> StoredWeight:
        if dim == 0:
            return replace(self, rows=self.rows[start : start + length])
        return replace(self, columns=self.columns[start : start + length])

    def select_rows(self, index: Tensor) -> StoredWeight:
        """The rows of these numbers, in this order."""
        rows = self.rows
        return replace(self, rows=index + rows.start if isinstance(rows, range) else rows[index])

    def read(self) -> Tensor | QuantizedWeight:
        rows = _around(self.rows, self.row_step, self.whole[0])
        columns = _around(self.columns, self.column_step, self.whole[1])
        if len(self.columns) % self.column_step:
            # with a neighbour, because a group that stands alone could not tell that it is cut through
            step = self.column_step
            columns = slice(max(0, columns.start - step), min(columns.stop + step, self.whole[1]))
        part = self.read_part(rows, columns)
        if isinstance(self.rows, Tensor):
            index = self.rows - rows.start
            part = part.index_select(0, index) if isinstance(part, Tensor) else part.select_rows(index)
        else:
            part = _narrowed(part, 0, self.rows, rows)
        return _narrowed(part, 1, self.columns, columns)


def read(weight: Tensor | QuantizedWeight | StoredWeight) -> Tensor | QuantizedWeight:
    """What is read already, as it is."""
    return weight.read() if isinstance(weight, StoredWeight) else weight


def _around(wanted: range | Tensor, step: int, total: int) -> slice:
    """From one multiple of `step` to another, or to the end."""
    if len(wanted) == 0:
        return slice(0, 0)
    first, last = (wanted[0], wanted[-1]) if isinstance(wanted, range) else (int(wanted.min()), int(wanted.max()))
    return slice(first // step * step, min(-(-(last + 1) // step) * step, total))


def _narrowed(part: Tensor | QuantizedWeight, dim: int, wanted: range, there: slice) -> Tensor | QuantizedWeight:
    if (wanted.start, wanted.stop) == (there.start, there.stop):
        return part
    return part.narrow(dim, wanted.start - there.start, len(wanted))

"""Embeddings: rows of a table by their numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def look_up(table: Tensor, ids_T: Tensor, first: int | None = None) -> Tensor:
    """[T, width]; every id is a row of the table. With `first`, the number of its first row among more rows, an id may
    be elsewhere and comes as zeros."""
    return table[ids_T] if first is None else rows_here(ids_T - first, len(table), lambda ids: table[ids])


def rows_here(ids_T: Tensor, num_rows: int, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Zeros for those that are no rows of this table."""
    is_here = (ids_T >= 0) & (ids_T < num_rows)
    found = rows(ids_T.clamp(0, num_rows - 1))
    return torch.where(is_here[:, None], found, torch.zeros_like(found))

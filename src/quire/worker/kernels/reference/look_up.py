"""Embeddings: rows of a table by their numbers."""

from __future__ import annotations

from torch import Tensor


def look_up(table: Tensor, ids_T: Tensor) -> Tensor:
    """[T, width]; every id is a row of the table."""
    return table[ids_T]

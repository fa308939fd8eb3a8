"""Small operations whose last argument may be left out. What each one means is written in `reference/<name>.py`."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators


def rotary_embedding(
    positions_T: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    cos_sin_cache_PR: Tensor,
    is_interleaved: bool = False,
) -> None:
    """Turn the first R dimensions of each head by the angles of the token's position, in place."""
    operators.rotary_embedding(positions_T, query_THD, key_TKD, cos_sin_cache_PR, is_interleaved)


def scale(x: Tensor, factor: float, is_division: bool = False) -> Tensor:
    """x * factor, or x / factor."""
    return operators.scale(x, factor, is_division)


def look_up(table: Tensor, ids_T: Tensor, first: int | None = None) -> Tensor:
    """Rows of a table by their numbers. `first`: that of the table's first row among more rows, of which those that are
    elsewhere come as zeros."""
    return operators.look_up(table, ids_T, first)

"""The small operations between the linear layers. What each one means is written in `reference/<name>.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels import operators


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, rounded where Transformers rounds."""
    return operators.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the norm at the head of a layer and the residual that goes on."""
    return operators.add_rms_norm(x, residual, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool) -> Tensor:
    """rms_norm(x * silu(gate)) or rms_norm(x) * silu(gate); the weight is for all rows or for each row of a token."""
    return operators.gated_rms_norm(x, gate, weight, eps, gates_first)


def silu_and_mul(x_T2I: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: the gate of a feed-forward layer."""
    return operators.silu_and_mul(x_T2I)


def clamped_swiglu(x_T2I: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) of the halves of the last dimension, both bounded by `limit`."""
    return operators.clamped_swiglu(x_T2I, alpha, limit)


def rotary_embedding(
    positions_T: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    cos_sin_cache_PR: Tensor,
    is_interleaved: bool = False,
) -> None:
    """Turn the first R dimensions of each head by the angles of the token's position, in place."""
    operators.rotary_embedding(positions_T, query_THD, key_TKD, cos_sin_cache_PR, is_interleaved)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of one shape and type."""
    return operators.add(x, y)


def join(tensors: list[Tensor]) -> Tensor:
    """Rows side by side, of tensors that are alike but for their last dimension; of one, a contiguous copy."""
    return operators.join(tensors)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In another type."""
    return operators.convert(x, dtype)


def scale(x: Tensor, factor: float, is_division: bool = False) -> Tensor:
    """x * factor, or x / factor."""
    return operators.scale(x, factor, is_division)


def look_up(table: Tensor, ids_T: Tensor, first: int | None = None) -> Tensor:
    """Rows of a table by their numbers. `first`: that of the table's first row among more rows, of which those that are
    elsewhere come as zeros."""
    return operators.look_up(table, ids_T, first)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x * y, of one shape and type."""
    return operators.multiply(x, y)


def activate(x: Tensor, kind: int) -> Tensor:
    """An activation element by element; `kind` is its index in `reference.activate.ACTIVATIONS`."""
    return operators.activate(x, kind)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / standard deviation * weight + bias over the last dimension."""
    return operators.layer_norm(x, weight, bias, eps)

"""Mixtures of experts: who computes a token, and the products. Specified in `reference/<name>.py`."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators


def route_tokens(
    logits_TX: Tensor,
    bias_X: Tensor | None,
    *,
    top_k: int,
    is_sigmoid: bool = False,
    is_normalised: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(weights, ids), [T, top_k] in float32 and int32: the experts of each token, and how much each of them counts."""
    return operators.route_tokens(logits_TX, bias_X, top_k, is_sigmoid, is_normalised, num_groups, top_groups, scale)


def grouped_linear(
    x: Tensor,
    ids_TK: Tensor | None,
    packed: list[Tensor],
    biases: list[Tensor],
    num_rows: int,
    counts_X: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """[T, K, num_rows]: rows of tokens, [T, C] or [T, K, C], times the packed weights of their experts. `biases`: one
    for each of them, or none. `counts`, int64, grows by the rows of each expert.

    The weights are those of experts `first` and following; rows for others are zeros, and are counted all the same.
    Without ids row k of each token goes to weight k.

    A row gives the same bits whatever other rows there are, and whoever else is sent to its expert.
    """
    return operators.grouped_linear(x, ids_TK, packed, biases, num_rows, counts_X, first)

"""One product an expert: rows of tokens with the weights of the experts that they are sent to."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.reference.packed_linear import packed_linear


def grouped_linear(
    x: Tensor,
    ids_TK: Tensor | None,
    packed: list[Tensor],
    biases: list[Tensor],
    num_rows: int,
    counts_X: Tensor | None,
    first: int = 0,
) -> Tensor:
    """[T, K, N]: row (t, k) is a row of x times the weight of expert ids[t, k], plus its bias if there are any.

    x is [T, C], a row for all experts of a token, or [T, K, C], a row for each. Without ids row k goes to weight k.
    Counts grow by the rows of each expert. The weights are those from expert `first` on: rows for others are zeros.
    """
    if ids_TK is None:
        ids_TK = torch.arange(len(packed), dtype=torch.int32, device=x.device).expand(x.shape[0], -1)
    num_tokens, top_k = ids_TK.shape
    if counts_X is not None:
        counts_X += ids_TK.flatten().bincount(minlength=len(counts_X))
    rows = x.unsqueeze(1).expand(num_tokens, top_k, x.shape[-1]) if x.ndim == 2 else x
    out_TKN = x.new_zeros((num_tokens, top_k, num_rows))
    for number, weight in enumerate(packed):
        of_expert_TK = ids_TK == first + number
        if of_expert_TK.any():
            bias = biases[number] if biases else None
            out_TKN[of_expert_TK] = packed_linear(rows[of_expert_TK], weight, bias, num_rows)
    return out_TKN

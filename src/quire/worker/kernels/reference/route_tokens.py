"""The experts of each token, and how much each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor

# what Transformers adds where it divides
_SMALLEST_SUM = 1e-20


def route_tokens(
    logits_TX: Tensor,
    bias_X: Tensor | None,
    top_k: int,
    is_sigmoid: bool,
    is_normalised: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(weights, ids), [T, top_k] in float32 and int32, greatest first; of equal ones the lower id.

    Scores are a softmax over all experts, or a sigmoid of each. `bias` counts for the choice alone. With fewer
    `top_groups` than `num_groups` only the best groups of experts are chosen from: a group is as good as its best
    expert, or as its two best ones where there is a bias. Weights are the scores of the chosen, divided by their sum if
    `is_normalised`, times `scale`.
    """
    logits_TX = logits_TX.float()
    scores_TX = logits_TX.sigmoid() if is_sigmoid else logits_TX.softmax(-1)
    ranks_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if top_groups < num_groups:
        ranks_TGx = ranks_TX.unflatten(1, (num_groups, -1))
        num_best = 1 if bias_X is None else min(2, ranks_TGx.shape[2])
        of_group_TG = ranks_TGx.topk(num_best, dim=-1).values.sum(-1)
        is_in_TG = torch.zeros_like(of_group_TG, dtype=torch.bool)
        is_in_TG.scatter_(1, _greatest(of_group_TG, top_groups), True)
        ranks_TX = ranks_TGx.masked_fill(~is_in_TG[..., None], -torch.inf).flatten(1)
    ids_TK = _greatest(ranks_TX, top_k)
    weights_TK = scores_TX.gather(1, ids_TK)
    if is_normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return weights_TK * scale, ids_TK.int()


def _greatest(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]

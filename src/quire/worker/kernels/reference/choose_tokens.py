"""From processed logits to one token a row: argmax, or temperature, min_p, top_k, top_p and one uniform number.

Greedy rows and drawing rows may be mixed. Drawing rows go on by kind (no limit, top_k, top_p alone) and in slices, and
nothing about a row depends on which others are in its slice. How they draw stands in `draw.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.reference.best_tokens import best_tokens
from quire.worker.kernels.reference.draw import draw_from_all, draw_from_top_k, draw_from_top_p, rows_in_slice
from quire.worker.staging import to_device


def choose_tokens(
    logits_NV: Tensor,
    rows_n: Tensor | None,
    temperature_n: Tensor,
    top_k_n: Tensor,
    top_p_n: Tensor,
    min_p_n: Tensor,
    uniform_n: Tensor,
) -> tuple[Tensor, Tensor]:
    """(token, greatest logit) of each row. Parameters are on the host; a temperature of 0 means greedy."""
    tokens_n, top_n = best_tokens(logits_NV, rows_n)
    is_drawing_n, has_top_k_n, has_top_p_n = temperature_n > 0, top_k_n < logits_NV.shape[1], top_p_n < 1.0
    step = rows_in_slice(logits_NV.shape[1], logits_NV.device)
    for is_kind_n in (~has_top_k_n & ~has_top_p_n, has_top_k_n, ~has_top_k_n & has_top_p_n):
        for index in (is_drawing_n & is_kind_n).nonzero()[:, 0].split(step):
            if len(index) == 0:
                continue
            (index_m,) = to_device([index.numpy()], logits_NV.device)
            logits_mV = logits_NV[index_m if rows_n is None else rows_n[index_m]].float()
            settings = [column[index] for column in (temperature_n, top_k_n, top_p_n, min_p_n, uniform_n)]
            tokens_n[index_m] = _draw(logits_mV, top_n[index_m], *settings)
    return tokens_n, top_n


def _draw(
    logits_mV: Tensor, top_m: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Tokens of rows of one kind. `logits_mV` is consumed.

    Weights are exp((logit - greatest) / temperature): the most probable token has weight 1 and nothing needs to be
    normalised, so min_p is a comparison.
    """
    columns = [column.numpy() for column in (temperature, top_k, top_p, min_p, uniform)]
    temperature_m, top_k_m, top_p_m, min_p_m, uniform_m = to_device(columns, logits_mV.device)
    weights_mV = logits_mV.sub_(top_m[:, None]).div_(temperature_m[:, None]).exp_()
    if torch.any(min_p > 0):
        weights_mV.mul_(weights_mV >= min_p_m[:, None])
    if int(top_k.min()) < logits_mV.shape[1]:
        return draw_from_top_k(weights_mV, top_k_m, int(top_k.max()), top_p_m, uniform_m)
    if float(top_p.min()) < 1.0:
        return draw_from_top_p(weights_mV, top_p_m, uniform_m)
    return draw_from_all(weights_mV, uniform_m)
